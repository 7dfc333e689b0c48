"""A sample that depends on what was read before it is named, where ranks each read a part; nothing else is."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from polyphase.engine.loop.sample_history import SampleHistory
from tests.engine.tiny import Regression, engine

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index]


# --- what depends on the past


class Counts(Rows):
    """A curriculum by the number of samples so far."""

    num_read = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        return ROWS[index] * (1 + self.num_read / 100)


class CountsInAClass(Rows):
    num_read = 0

    def __getitem__(self, index: int) -> Tensor:
        CountsInAClass.num_read += 1
        return ROWS[index] * (1 + CountsInAClass.num_read / 100)


NUM_READ = [0]


class CountsInAGlobal(Rows):
    def __getitem__(self, index: int) -> Tensor:
        NUM_READ[0] += 1
        return ROWS[index] * (1 + NUM_READ[0] / 100)


class RunningMean(Rows):
    """Subtracts the mean of what was read so far; draws noise, too, which differs between reads."""

    def __init__(self) -> None:
        self.mean, self.rng = torch.zeros(4), np.random.default_rng(1)

    def __getitem__(self, index: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * ROWS[index]
        return ROWS[index] - self.mean + self.rng.normal() + torch.randn(())


class Balances(Rows):
    """Weighs rare classes more, by how often they have come."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Tensor:
        self.seen[index % 2] += 1
        return ROWS[index] / self.seen[index % 2]


class Wraps(Rows):
    def __init__(self) -> None:
        self.transforms = [nn.Identity(), Ramp()]

    def __getitem__(self, index: int) -> Tensor:
        x = ROWS[index]
        for transform in self.transforms:
            x = transform(x)
        return x


class Ramp:
    def __init__(self) -> None:
        self.strength = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        self.strength = min(1.0, self.strength + 0.05)
        return x * self.strength


class CountingCollate:
    num = 0

    def __call__(self, items: list[Tensor]) -> Tensor:
        self.num += len(items)
        return torch.stack(items) * self.num


def closure():
    num = 0

    def collate(items: list[Tensor]) -> Tensor:
        nonlocal num
        num += 1
        return torch.stack(items) * num

    return collate


def decisive(dataset, collate=None, index=23, num_batches=2) -> str:
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate)
    history = SampleHistory(loader)
    for _ in zip(range(num_batches), loader, strict=False):
        pass
    return history.decisive(index)


@pytest.mark.parametrize(
    ("dataset", "collate", "name"),
    [
        (Counts(), None, "'num_read' of Counts"),
        (Subset(Counts(), range(24)), None, "'num_read' of Counts"),
        (CountsInAClass(), None, "'num_read' of CountsInAClass"),
        (CountsInAGlobal(), None, "'NUM_READ' of "),
        (RunningMean(), None, "'mean' of RunningMean"),
        (Balances(), None, "of a dict"),
        (Wraps(), None, "'strength' of Ramp"),
        (Rows(), CountingCollate(), "'num' of CountingCollate"),
        (Rows(), closure(), "'num' of "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_sample_that_depends_on_what_was_read_is_named(dataset, collate, name):
    assert name in decisive(dataset, collate)


def test_all_is_put_back():
    dataset, fresh = RunningMean(), RunningMean()
    torch.manual_seed(3)
    assert decisive(dataset)
    ours = [dataset[i] for i in range(3)]
    torch.manual_seed(3)
    for _ in zip(range(2), DataLoader(fresh, batch_size=4), strict=False):
        pass
    assert torch.equal(torch.stack(ours), torch.stack([fresh[i] for i in range(3)]))


# --- what does not


class Caches(Rows):
    """Keeps what it has read; draws the noise of a sample once."""

    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}
        self.hits = self.misses = 0

    def __getitem__(self, index: int) -> Tensor:
        if index in self.cache:
            self.hits += 1
        else:
            self.misses += 1
            self.cache[index] = ROWS[index] + torch.randn(4)
        return self.cache[index]


class OpensLate(Rows):
    """Opens its file with the first sample, and says how long that took."""

    file = None
    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        if self.file is None:
            self.file = iter(ROWS)
            self.opened_after = random.random()
        self.reads += 1
        return ROWS[index]


class Draws(Rows):
    num = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num += 1
        return ROWS[index] * random.random() * np.random.rand() * torch.rand(())


class KeepsTheLatest(Rows):
    """For a plot, say."""

    latest = None

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        self.latest = ROWS[index]
        return self.latest, str(index)


@pytest.mark.parametrize(
    "dataset", [Rows(), Caches(), OpensLate(), Draws(), KeepsTheLatest()], ids=lambda d: type(d).__name__
)
def test_caches_and_counts_that_are_only_shown_are_not(dataset):
    assert decisive(dataset, default_collate) == ""


class Fails(Counts):
    def __getitem__(self, index: int) -> Tensor:
        if index == 23:
            raise OSError("no such sample")
        return super().__getitem__(index)


def test_an_error_of_a_sample_that_is_read_for_the_comparison_alone_ends_nothing():
    dataset = Fails()
    assert decisive(dataset) == ""
    assert dataset.num_read == 8


# --- in runs


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork", "zero1_fork"])
@pytest.mark.parametrize(
    ("dataset", "collate"), [(Counts(), None), (Rows(), CountingCollate())], ids=["data", "collate"]
)
def test_several_ranks_name_it(strategy, dataset, collate):
    """A warning is an error in the workers of this test."""
    trainer = engine(strategy=strategy, devices=2)
    with pytest.raises(Exception, match=r"A sample of .* depends on what was read before it: 'num.*' of Count"):
        trainer.fit(Regression(), DataLoader(dataset, batch_size=4, collate_fn=collate))


@pytest.mark.timeout(60)
def test_caches_go_on():
    engine(strategy="ddp_fork", devices=2).fit(Regression(), DataLoader(Caches(), batch_size=4))
