"""Buffers that each rank updates by its own samples are named once, and `average_buffers=true` averages them."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.engine.parity import largest_difference
from tests.engine.tiny import StepsByHand, engine

INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(3))
"""In global batches of four: the last one has no sample for the second rank."""


class RunningMean(LightningModule):
    """The mean has no part in the loss, so that a loop by hand has the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.ones(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * batch.mean(0)
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(RunningMean):
    """Counts samples, in whole numbers, in place of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.counts += torch.stack([(batch > 0).sum(), (batch < 0).sum()])
        loss = super().training_step(batch, batch_idx)
        self.mean.zero_()
        return loss


class ByHand(StepsByHand, RunningMean):
    pass


def fitted(module: LightningModule, strategy: str) -> LightningModule:
    engine(strategy=strategy, devices=2, max_epochs=2).fit(module, DataLoader(INPUTS, batch_size=2))
    return module


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("strategy", "cls"),
    [
        ("ddp_fork:average_buffers=true", RunningMean),
        ("zero1_fork:average_buffers=true,broadcast_buffers=false", RunningMean),
        ("fsdp_fork:average_buffers=true", RunningMean),
    ],
)
def test_the_average_is_that_of_one_process(strategy, cls):
    plain = RunningMean()
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for batch in INPUTS.split(4):
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()
            optimizer.step()
    assert largest_difference(fitted(cls(), strategy).state_dict(), plain.state_dict()) <= 1e-6


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("strategy", "cls", "name", "option"),
    [
        ("ddp_fork", RunningMean, "mean", "'ddp_fork:average_buffers=true'"),
        ("fsdp_fork", ByHand, "mean", "'fsdp_fork:average_"),
        ("ddp_fork", Counts, "counts", "'ddp_fork:average_buffers=true'"),
    ],
)
def test_buffers_that_differ_are_named(strategy, cls, name, option):
    """A warning is an error in the workers of this test."""
    with pytest.raises(Exception, match=rf"different values of '{name}': .*by the samples of its own rank.*{option}"):
        fitted(cls(), strategy)
