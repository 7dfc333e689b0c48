"""State that each rank makes of its own samples is named once; `average_buffers=true` averages buffers."""

import random
from collections import deque

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

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


class Scales(RunningMean):
    """Divides by a running mean of its losses, which is no buffer."""

    scale = 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = sum((self.net(row) - row.sum()).square().mean() for row in batch) / len(batch)  # a function inside
        self.scale = 0.9 * self.scale + 0.1 * loss.item()
        return loss / self.scale


class SkipsByFlag(RunningMean):
    """One rank decides, by its own samples, say; and `self` has another name."""

    skips = False

    def training_step(this, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: N805
        loss = (this.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss * 0 if this.skips else loss

    def on_train_batch_end(self, *_) -> None:
        if self.global_rank == 0:
            self.skips = True


class Queue(nn.Module):
    """Moves away from what it has seen, as a contrastive loss does."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = deque(maxlen=8)

    def forward(self, values: Tensor) -> Tensor:
        far = sum(((values - other) ** 2).mean() for other in list(self._seen))
        self._seen.append(values.detach().mean(0))
        return values.square().mean() - 0.01 * far


class Contrasts(RunningMean):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.queue(self.net(batch))


class Picks(Sampler):
    """Draws another order for each loss."""

    def __init__(self) -> None:
        self.losses = 0.0

    def __len__(self) -> int:
        return len(INPUTS)

    def __iter__(self):
        yield from random.Random(self.losses).sample(range(len(INPUTS)), len(INPUTS))


class PicksByLoss(RunningMean):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.trainer.train_dataloader.sampler.sampler.losses += loss.item()
        return loss


class Reports(RunningMean):
    """Keeps what it shows at the end of an epoch, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.calls, self.rank = [], 0, None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rank, self.calls = self.global_rank, self.calls + 1
        loss = self.net(batch).square().mean()
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.shown = torch.stack(self.outputs).mean()
        self.outputs.clear()


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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("strategy", "cls", "name"),
    [
        ("ddp_fork", Scales, "scale"),
        ("zero1_fork", Scales, "scale"),
        ("ddp_fork", SkipsByFlag, "skips"),
        ("fsdp_fork", Scales, "scale"),
        ("ddp_fork", Contrasts, "queue._seen"),
        ("fsdp_fork", Contrasts, "queue._seen"),
    ],
)
def test_attributes_that_differ_and_decide_are_named(strategy, cls, name):
    with pytest.raises(Exception, match=rf"different values of '{name}': the module keeps in these attributes"):
        fitted(cls(), strategy)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_a_sampler_that_decides_by_its_ranks_losses_is_named(strategy):
    trainer = engine(strategy=strategy, devices=2, max_epochs=3)
    with pytest.raises(Exception, match=r"different orders of sampler 0 \(Picks\), of which each reads its part"):
        trainer.fit(PicksByLoss(), DataLoader(INPUTS, batch_size=2, sampler=Picks()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_what_is_kept_to_be_shown_is_not(strategy):
    fitted(Reports(), strategy)
