"""Parameters that a step or a hook writes, as momentum encoders do: they count, or the run ends by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyphase.engine import Engine
from tests.zoo.model import Model, Zoo, loader, plain_loop
from tests.zoo.run import largest_difference

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
    flags = {"devices": 2, "accelerator": "cpu", "max_epochs": 1, "check_first_steps": False, **QUIET}
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
