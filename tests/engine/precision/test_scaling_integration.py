"""`16-mixed` where ranks have gradients of different parameters: all of them skip the same steps."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import QUIET, largest_difference, suffixed

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
Y = 0.1 * X.sum(1, keepdim=True)
OVERFLOWS = (1, 4)
"""Batches in which the gradient of one parameter overflows."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss so small that nothing else overflows under the first scale."""
    return 0.01 * mse_loss(outputs, targets)


class Overflow(torch.autograd.Function):
    """The identity; its gradient is infinite where asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: Tensor) -> Tensor:
        ctx.save_for_backward(where)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (where,) = ctx.saved_tensors
        return torch.where(where, torch.inf, gradients[0]), None


class Block(nn.Module):
    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.linear, self.bias, self.overflows = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), overflows

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        bias = Overflow.apply(self.bias, where) if self.overflows else self.bias
        return x + torch.tanh(self.linear(x)) + bias


class Net(LightningModule):
    """The gradient of one block's bias overflows; the gradients of all others are finite."""

    def __init__(self, overflowing_block: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number == overflowing_block) for number in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, where)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, where = batch
        return loss_of(self(x, where.any()), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 5.0, momentum=0.5)


class LowestScale(Callback):
    """Checks on each rank that the scale has been halved once for each overflow."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.precision_plugin.scaler.get_scale() == 2**16 / 2 ** len(OVERFLOWS)


class Fused(Net):
    """With a fused optimizer, which would unscale its gradients after they are clipped."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 5.0, momentum=0.5, fused=True)


def loader(num_ranks: int = 1) -> DataLoader:
    where = torch.zeros(48, dtype=torch.bool)
    for batch in OVERFLOWS:
        where[8 * batch : 8 * (batch + 1)] = True
    return DataLoader(TensorDataset(X, Y, where), 8 // num_ranks)


def build(block: int, kind: type[Net] = Net) -> Net:
    torch.manual_seed(1)
    return kind(block)


def plain_loop(block: int, clip: float | None) -> dict[str, Tensor]:
    module = build(block)
    optimizer, scaler = module.configure_optimizers(), torch.amp.GradScaler("cpu")
    for x, y, where in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(module(x, where.any()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2**16 / 2 ** len(OVERFLOWS)
    return module.state_dict()


@pytest.mark.parametrize(
    ("flag", "num_ranks", "block", "clip", "kind"),
    [
        ("pp", 2, 0, 1e-3, Net),
        ("pp", 2, 3, None, Net),
        ("pp+ddp", 4, 0, 1e-3, Net),
        ("pp+fsdp", 4, 3, None, Net),
        ("ps", 2, 0, None, Net),
        ("ps", 2, 3, 1e-3, Net),
        ("single", 1, 0, 1e-3, Fused),
        ("ddp", 2, 3, 1e-3, Fused),
        ("pp", 2, 3, 1e-3, Fused),
    ],
)
def test_an_overflow_skips_the_step_on_all_ranks(flag, num_ranks, block, clip, kind):
    module = build(block, kind)
    engine = Engine(
        strategy=suffixed(flag, "fork"),
        accelerator="cpu",
        devices=num_ranks,
        precision="16-mixed",
        max_epochs=1,
        gradient_clip_val=clip,
        callbacks=[LowestScale()],
        **QUIET,
    )
    engine.fit(module, loader(engine.data_size))
    # A micro-batch's gradient is rounded to the 11 bits of float16.
    assert largest_difference(module.state_dict(), plain_loop(block, clip)) <= 1e-3


def test_a_worker_whose_gradients_overflow_pushes_none_and_goes_on():
    module = build(0)
    engine = Engine(
        strategy="ps_fork:staleness=2",
        accelerator="cpu",
        devices=2,
        precision="16-mixed",
        max_epochs=1,
        callbacks=[LowestScale()],
        **QUIET,
    )
    engine.fit(module, loader(2))
    moved = largest_difference(module.state_dict(), build(0).state_dict())
    assert 1e-3 < moved < float("inf")


class NearTheLimit(LightningModule):
    """Under the first scale a sample's gradient is the largest number of float16, or nearly, and later above it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(8, 1, bias=False), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.linear(1e-3 * batch[0]).float().mean() * (3.9 if batch_idx < 2 else 4.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.scaler.get_scale())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Scales(Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.callback_metrics.update({f"scale{i}": torch.tensor(s) for i, s in enumerate(pl_module.scales)})


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp"])
def test_the_same_steps_overflow_on_any_number_of_ranks(strategy):
    torch.manual_seed(0)
    devices = 1 if strategy == "single" else 4
    flags = {**QUIET, "accelerator": "cpu", "devices": devices, "max_epochs": 1, "precision": "16-mixed"}
    engine = Engine(strategy=suffixed(strategy, "fork"), callbacks=[Scales()], **flags)
    engine.fit(NearTheLimit(), DataLoader(TensorDataset(X[:16]), batch_size=4 // devices))
    scales = [float(engine.callback_metrics[f"scale{i}"]) for i in range(4)]
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
