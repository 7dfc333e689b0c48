"""Optimizers that do more than compute element by element."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, library, nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

from .attentions import DIM, NormedHeads, Residual

DATA = torch.randn(16, 4, DIM, generator=torch.Generator().manual_seed(0))


class LAMB(torch.optim.Optimizer):
    """As timm has it: a norm of all gradients divides them in place, and norms of weights and updates are compared."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]))
        largest = torch.tensor(0.5, device=parameters[0].device)
        squares = torch.zeros(1, device=parameters[0].device)
        for p in parameters:
            squares.add_(p.grad.pow(2).sum())
            p.grad.div_(torch.where(norm > largest, norm / largest, 1.0))
            state = self.state[p]
            if not state:
                state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
            state["first"].lerp_(p.grad, 0.1)
            state["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = state["first"] / state["second"].sqrt().add_(1e-3)
            update.add_(p, alpha=0.01)
            ratio = torch.where(p.norm() > 0, torch.where(update.norm() > 0, p.norm() / update.norm(), 1.0), 1.0)
            p.add_(update.mul_(ratio.clamp(max=1.0)), alpha=-self.param_groups[0]["lr"])
        assert abs(float(squares.sqrt()) - float(norm)) < 1e-4
        return loss


@library.custom_op("tests::rounded", mutates_args=())
def rounded(gradient: Tensor) -> Tensor:
    """An operator of the user's own, which no version of torch can know how to split."""
    return gradient.round(decimals=3)


class Rounding(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(rounded(p.grad), alpha=0.01)
        return loss


OPTIMIZERS: dict[str, Any] = {
    "LAMB": LAMB,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01, foreach=True),
    "Adafactor, one by one": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01, foreach=False),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "Rounding": Rounding,
}


class Net(LightningModule):
    """Some parameters are split, and others are not."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(DIM, DIM), NormedHeads(), nn.LayerNorm(DIM), Residual(), nn.Linear(DIM, 2))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](list(self.parameters()))


def fit(module: Net) -> None:
    engine = Engine(strategy="tp_fork", devices=2, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(module, DataLoader(DATA, batch_size=8))


def plain_loop(module: Net) -> None:
    optimizer: Any = module.configure_optimizers()
    for batch in DATA.split(8):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = module.training_step(batch, 0)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("optimizer", ["LAMB", "Adafactor", "LBFGS", "Rounding", *nightly("Adafactor, one by one")])
def test_it_steps_as_with_whole_parameters(optimizer):
    expected, found = Net(optimizer), Net(optimizer)
    plain_loop(expected)
    fit(found)
    assert largest_difference(found.state_dict(), expected.state_dict()) <= TOLERANCE
    assert largest_difference(found.state_dict(), Net(optimizer).state_dict()) > 100 * TOLERANCE
