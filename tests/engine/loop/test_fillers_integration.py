"""A rank without a sample runs a filler, which counts for nothing: statistics, gathered rows, metrics, logs."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, SumMetric

from polyphase.engine.distributed.fillers import among_fillers, rows_of_samples
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.tiny import StepsByHand, engine

INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(3))
"""In global batches of four: the last one has a single sample, and so none for the second rank."""
BATCH, EPOCHS, RANKS = 4, 2, 2


class Normed(LightningModule):
    """Its batch norms see one sample in the last batch: torch's own layer refuses that, so the loss has the formula."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def normed(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.last(self.normed(self.first(batch)).tanh()) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class NormedByHand(StepsByHand, Normed):
    pass


class PlainNormed(Normed):
    """The reference: batch norm by its formula, in one process."""

    def normed(self, inputs: Tensor) -> Tensor:
        norm = self.norm
        variance, mean = torch.var_mean(inputs, 0, correction=0)
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, 0.1)
            norm.running_var.lerp_(variance * len(inputs) / max(len(inputs) - 1, 1), 0.1)
        return (inputs - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


class Contrasts(LightningModule):
    """Each sample against those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, 6)

    def gathered(self, others: Tensor) -> tuple[Tensor, int]:
        return self.all_gather(others, sync_grads=True).flatten(0, 1), len(others) * self.global_rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ones = functional.normalize(self.one(batch), dim=-1)
        others, first = self.gathered(functional.normalize(self.other(batch.flip(1)), dim=-1))
        return functional.cross_entropy(3 * ones @ others.T, torch.arange(len(batch)) + first)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ContrastsByHand(StepsByHand, Contrasts):
    pass


class PlainContrasts(Contrasts):
    def gathered(self, others: Tensor) -> tuple[Tensor, int]:
        return others, 0


def plain_loop(module: LightningModule) -> dict[str, Tensor]:
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in INPUTS.split(BATCH):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return module.state_dict()


def fitted(module: LightningModule, strategy: str, **flags: Any) -> LightningModule:
    trainer = engine(strategy=strategy, devices=RANKS, max_epochs=EPOCHS, **flags)
    trainer.fit(module, DataLoader(INPUTS, batch_size=BATCH // RANKS))
    return module


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("strategy", "module", "plain"),
    [
        ("ddp_fork", Normed, PlainNormed),
        ("fsdp_fork", Normed, PlainNormed),
        ("ddp_fork", NormedByHand, PlainNormed),
        ("zero1_fork", Contrasts, PlainContrasts),
        ("fsdp_fork", Contrasts, PlainContrasts),
        ("ddp_fork", ContrastsByHand, PlainContrasts),
    ],
)
def test_a_filler_counts_for_nothing_in_what_the_ranks_share(strategy, module, plain):
    found = fitted(module(), strategy, sync_batchnorm=module in (Normed, NormedByHand))
    assert largest_difference(found.state_dict(), plain_loop(plain())) <= TOLERANCE


class Measures(LightningModule):
    """Logs metrics of each kind of state, and computes one by itself that is never reset."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.net, self.first = nn.Linear(4, 1), first
        self.mean, self.total, self.all_seen, self.epoch_mean = MeanMetric(), SumMetric(), CatMetric(), MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.epoch_mean.update(batch.sum(1))
        self.log("trained", self.epoch_mean, on_step=False, on_epoch=True)
        self.log("logged", batch.sum(1).mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for row in batch.sum(1):
            self.all_seen.update(row)
        if batch_idx < self.first:
            return
        self.mean.update(batch.sum(1))
        self.total.update(batch.sum(1))
        self.log("mean", self.mean)
        self.log("total", self.total)
        self.log("own", batch.sum(), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("num_seen", float(self.all_seen.compute().numel()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
@pytest.mark.parametrize("strategy", ["ddp_fork", "zero1_fork", "fsdp_fork", "hsdp_fork:shard=2,replicate=1"])
def test_later_validations_with_fewer_samples_than_ranks(strategy):
    """Of one sample, after the sanity check and two more; and training with one sample on two ranks."""
    trainer = engine(strategy=strategy, devices=RANKS, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(Measures(), DataLoader(INPUTS[:1]), DataLoader(INPUTS[1:2]))
    found, expected = trainer.callback_metrics, float(INPUTS[1].sum())
    assert found["mean"] == found["total"] == found["own"] == pytest.approx(expected, abs=1e-6)
    assert found["num_seen"] == 3
    assert found["trained"] == found["logged"] == pytest.approx(float(INPUTS[0].sum()), abs=1e-6)


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_names_that_only_fillers_of_a_rank_have_logged():
    """From the second batch on values are logged; of that the second rank has only a filler."""
    trainer = engine(strategy="ddp_fork", devices=RANKS, max_epochs=2)
    trainer.fit(Measures(first=1), DataLoader(INPUTS, batch_size=BATCH // RANKS), DataLoader(INPUTS[:5], batch_size=2))
    found, expected = trainer.callback_metrics, float(INPUTS[4].sum())
    assert found["mean"] == found["total"] == found["own"] == pytest.approx(expected, abs=1e-6)
    assert found["trained"] == found["logged"] == pytest.approx(float(INPUTS.sum(1).mean()), abs=1e-6)


class Shares(IterableDataset[Tensor]):
    shards_itself = True

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return iter(INPUTS[: self.sizes[torch.distributed.get_rank()]])


@pytest.mark.timeout(60)
def test_gathered_rows_that_can_not_be_left_out():
    trainer = engine(strategy="ddp_fork", devices=RANKS)
    with pytest.raises(Exception, match=r"rank\(s\) \[0\] have no sample"):
        trainer.fit(Contrasts(), DataLoader(Shares(1, 3)))


def test_rows_of_samples():
    rows = torch.arange(6).view(3, 2)
    with among_fillers(is_filler=False):
        assert rows_of_samples(rows, [False, False, True]).tolist() == [[0, 1], [2, 3]]
    with among_fillers(is_filler=True):
        assert len(rows_of_samples(rows, [False, False, True])) == 3, "its own code may look for its own row"
    with pytest.raises(ValueError, match=r"rank\(s\) \[0\] have no sample of"):
        rows_of_samples(rows, [True, False, False])
