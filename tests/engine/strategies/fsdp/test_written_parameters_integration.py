"""Parameters that a step or a hook writes, as momentum encoders do: they count, or the run ends by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.functional import mse_loss

from polyphase.engine import Engine
from tests.pairs import nightly
from tests.zoo.model import Model, Zoo, loader, plain_loop
from tests.zoo.plain import rows
from tests.zoo.run import largest_difference
from tests.zoo.unusual import Blocks

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Momentum(Zoo):
    """As MoCo's own code has it."""

    def __init__(self, *, in_step: bool) -> None:
        super().__init__()
        self.query, self.in_step = mlp(), in_step
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def _follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.in_step:
            with torch.no_grad():
                self._follow()
        rows, others = batch
        return mse_loss(self.query(rows), self.key(others).detach() + 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.in_step:
            self._follow()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.query.parameters(), lr=0.2)


def _model(*, in_step: bool) -> Model:
    return Model(lambda: Momentum(in_step=in_step), lambda n: (torch.randn(n, 8), torch.randn(n, 8)))


def _trained(model: Model, flag: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = model.make().train()
    flags = {
        "devices": 4 if "+" in flag else 2,
        "accelerator": "cpu",
        "max_epochs": 1,
        "check_first_steps": False,
        **QUIET,
    }
    engine = Engine(strategy=flag, **flags)
    engine.fit(module, loader(model, engine.data_size))
    return module.state_dict()


@pytest.mark.parametrize(
    ("flag", "in_step"),
    [("ddp_fork", True), ("tp_fork", True), ("tp_fork", False), ("fsdp_fork", True), ("fsdp_fork", False)],
)
def test_data_that_is_assigned_counts(flag, in_step):
    model = _model(in_step=in_step)
    assert largest_difference(_trained(model, flag), plain_loop(model)) <= 1e-6
    assert "data" not in vars(torch.distributed.tensor.DTensor)


class Masked(Blocks):
    """Prunes by plain masks, in hooks: gradients before the step, weights after it."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [(torch.arange(p.numel()).reshape(p.shape) % 3 > 0).float() for p in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter, mask in zip(self.parameters(), self.masks, strict=True):
            if parameter.grad is not None:
                parameter.grad *= mask

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter, mask in zip(self.parameters(), self.masks, strict=True):
            parameter.data = torch.where(mask > 0, parameter.data, torch.zeros(()))
            with torch.no_grad():
                parameter.mul_(mask)


@pytest.mark.parametrize("flag", ["fsdp_fork", "tp_fork", "pp+fsdp_fork", *nightly("fsdp+tp_fork", "pp_fork")])
def test_hooks_combine_split_parameters_with_plain_masks(flag):
    model = Model(Masked, rows())
    assert largest_difference(_trained(model, flag), plain_loop(model)) <= 1e-6


class DrawsAnew(Blocks):
    """In a hook: a head of new random numbers, noise on the blocks, and gradients by way of one vector."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        trained = [p for p in self.parameters() if p.grad is not None]
        vector = nn.utils.parameters_to_vector([p.grad for p in trained])  # type: ignore[misc]
        parts = (vector / vector.abs().max()).split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.largest = self.blocks[0].up.weight.unfold(0, 2, 2).amax()  # torch can't split this view
        torch.manual_seed(batch_idx + int(100 * self.largest.abs()))
        if batch_idx == 1:
            self.head.weight.data.normal_()
        with torch.no_grad():
            for block in self.blocks:
                block.up.weight.add_(torch.randn_like(block.up.weight), alpha=0.1)


@pytest.mark.parametrize("flag", ["fsdp_fork", "tp_fork"])
def test_random_numbers_of_hooks_are_those_of_whole_parameters(flag):
    model = Model(DrawsAnew, rows())
    assert largest_difference(_trained(model, flag), plain_loop(model)) <= 1e-6


class CopiesItsHead(Blocks):
    """A hook copies the head, which has a gradient then."""

    teachers: tuple[nn.Module, ...] = ()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.teachers = (copy.deepcopy(self.head).requires_grad_(False),)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for teacher in self.teachers:
                for parameter, old in zip(self.head.parameters(), teacher.parameters(), strict=True):
                    parameter.lerp_(old, 0.5)


def test_hooks_copy_sharded_layers_that_have_gradients():
    model = Model(CopiesItsHead, rows())
    assert largest_difference(_trained(model, "fsdp_fork"), plain_loop(model)) <= 1e-6


class ScalesByBatch(Blocks):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.head.weight.mul_(batch[0].mean())


def test_plain_tensors_of_one_rank_are_refused():
    text = (
        r"on_train_batch_end combines a parameter .* with a tensor of shape \(\), which has other values on each rank"
    )
    with pytest.raises(ProcessRaisedException, match=text):
        _trained(Model(ScalesByBatch, rows()), "fsdp_fork")


class Parts(nn.Module):
    """Blocks without a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return x


class Regression(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.net = Parts()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, targets = batch
        return mse_loss(self.net(rows), targets)


def test_blocks_without_a_forward_are_no_units():
    model = Model(Regression, lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    assert largest_difference(_trained(model, "fsdp_fork"), plain_loop(model)) <= 1e-6
