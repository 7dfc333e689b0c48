"""Optimizers that read norms as numbers, under strategies whose parameters are shards: the norms of the whole."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.engine.parity import largest_difference
from tests.engine.strategies.fsdp.test_unit_order_integration import ROWS, Skipping, fit
from tests.pairs import alternating


class LARS(torch.optim.Optimizer):
    """https://arxiv.org/abs/1708.03888, without momentum: each parameter's step by two norms."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"])
        return loss

    def update(self, p: Tensor, gradient: Tensor, lr: float) -> None:
        p.add_(gradient, alpha=-lr * 0.02 * float(p.norm()) / (gradient.norm().item() + 1e-9))


class LAMB(LARS):
    """https://arxiv.org/abs/1904.00962: the norm of Adam's step. Its sums over gradients are read as well."""

    def update(self, p, gradient, lr):
        state = self.state[p]
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        gradient = gradient / max(1.0, math.sqrt(float(gradient.square().sum())))
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.square(), 0.01)
        mean, square = state["mean"] / (1 - 0.9 ** state["step"]), state["square"] / (1 - 0.99 ** state["step"])
        step = mean / (square.sqrt() + 1e-4)
        p.add_(step, alpha=-0.1 * lr * p.norm().item() / step.norm().item())


class Scaled(Skipping):
    def __init__(self, optimizer: type[LARS]) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


@pytest.mark.parametrize(
    ("strategy", "devices", "optimizer"), alternating([("fsdp_fork", 2), ("hsdp_fork:replicate=2", 4)], [LAMB, LARS])
)
def test_an_optimizer_that_reads_norms_equals_a_plain_loop(strategy, devices, optimizer):
    module, plain = Scaled(optimizer), Scaled(optimizer)
    by_hand = plain.configure_optimizers()
    for number, batch in enumerate(ROWS[:24].split(8)):
        by_hand.zero_grad()
        plain.loss(batch, number).backward()
        by_hand.step()
    assert largest_difference(plain.state_dict(), Skipping().state_dict()) > 1e-2
    fit(module, strategy, devices, limit_train_batches=3)
    assert largest_difference(module.state_dict(), plain.state_dict()) < 1e-6


class ReadByOne(Skipping):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 0:
            float(self.blocks[0].weight.norm())


def test_a_norm_that_one_rank_reads_alone_is_refused():
    with pytest.raises(ProcessRaisedException, match=r"rank 0 reads a number of a sharded tensor \(`item`, `float`\)"):
        fit(ReadByOne())


class Norms(Skipping):
    """Asks Lightning for the norms of its gradients, as its documentation has it."""

    def on_before_optimizer_step(self, optimizer):
        found = grad_norm(self, norm_type=2)
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        whole = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients.items()}
        for name, gradient in whole.items():
            torch.testing.assert_close(found[f"grad_2.0_norm/{name}"], gradient.norm())
        torch.testing.assert_close(
            found["grad_2.0_norm_total"], torch.stack([gradient.norm() for gradient in whole.values()]).norm()
        )
        self.log_dict(found)


def test_lightnings_norms_of_gradients_are_those_of_whole_ones():
    code = grad_norm.__code__
    fit(Norms())
    assert grad_norm.__code__ is code
    module = torch.nn.Linear(2, 1)
    assert grad_norm(module, 2) == {}
