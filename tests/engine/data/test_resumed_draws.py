"""What data sets draw at random, in this process and in workers, from global generators and from ones of their own."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from polyphase.engine.data.own_generators import OwnGenerators, set_own_states
from tests.pairs import alternating, nightly, paired

from ..tiny import SavesIn
from . import runs
from .runs import assert_goes_on, train

SIZE = 14


class Own:
    """Generators of all kinds."""

    def __init__(self) -> None:
        self.new, self.old = np.random.default_rng(3), np.random.RandomState(3)
        self.torchs, self.pythons = torch.Generator().manual_seed(3), random.Random(3)

    def __call__(self) -> list[float]:
        numpys = [self.new.random(), self.old.rand()]
        return [*map(float, numpys), float(torch.rand((), generator=self.torchs)), self.pythons.random()]


def from_globals() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


class Augmented(Dataset[torch.Tensor]):
    def __init__(self, draws: Any) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *self.draws()], dtype=torch.float64)


class Drawn(IterableDataset[torch.Tensor]):
    """A stream whose samples are augmented."""

    def __init__(self, draws: Any) -> None:
        self.draws = draws

    def numbers(self) -> list[int]:
        worker = get_worker_info()
        return list(range(worker.id, SIZE, worker.num_workers) if worker else range(SIZE))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i), *self.draws()], dtype=torch.float64) for i in self.numbers())


class Stated(Drawn):
    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = self.numbers()
        while self.at < len(numbers):
            self.at += 1
            yield torch.tensor([float(numbers[self.at - 1]), *self.draws()], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled(Drawn):
    """Its order is drawn when it is iterated."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = torch.tensor(self.numbers())
        order = np.argsort([self.draws()[0] for _ in numbers])
        return iter(numbers[order.tolist()])


class Shards(Drawn):
    """Shards of four, each in an order that is drawn."""

    shards_in_order = True

    def __init__(self, draws: Any, indices: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__(draws)
        self.indices = indices

    @property
    def num_shards(self) -> int:
        return len(self.indices)

    def shard(self, num_shards: int, index: int) -> "Shards":
        return Shards(self.draws, self.indices[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in self.indices:
            for i in np.argsort([self.draws()[0] for _ in range(4)]):
                yield torch.tensor([float(4 * shard + i), *self.draws()], dtype=torch.float64)


class AlsoDraws(runs.Trains):
    """Its steps draw from the generators from which the data are drawn."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.rand(3), random.random(), np.random.rand()
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _draws_too(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    monkeypatch.setattr(runs, "Trains", AlsoDraws)


def loader(kind: type, draws: Any, **workers: Any) -> Any:
    return DataLoader(kind(draws()), 2, shuffle=True if kind is Augmented else None, **workers)


WORKERS = {"num_workers": 2}
STAY = {**WORKERS, "persistent_workers": True}
BETWEEN = {"hook": "on_train_epoch_end"}
WINDOW = {"accumulate_grad_batches": 3}


@pytest.mark.filterwarnings("ignore:.* was read again up to its place")
@pytest.mark.parametrize(
    ("kind", "draws", "at", "flags"),
    paired(
        [Augmented, Drawn, Stated, Shuffled, Shards],
        [Own, lambda: from_globals],
        [(10, {}), (4, WINDOW), (1, BETWEEN)],
    ),
)
def test_goes_on_with_the_same_draws(kind, draws, at, flags, tmp_path):
    assert_goes_on(partial(loader, kind, draws), tmp_path, at, **{"max_epochs": 2, **flags})


@pytest.mark.parametrize(
    ("kind", "draws", "workers", "at", "flags"),
    [
        *alternating(
            [(Augmented, Own, STAY), (Stated, Own, WORKERS), (Shards, lambda: from_globals, WORKERS)],
            [(10, {}), (1, BETWEEN)],
        ),
        (Shuffled, lambda: from_globals, STAY, 10, {}),
        *nightly(
            (Shuffled, lambda: from_globals, STAY, 1, BETWEEN),
            *(
                (*data, *place)
                for data in [
                    (Augmented, Own, WORKERS),
                    (Stated, lambda: from_globals, WORKERS),
                    (Shards, Own, STAY),
                ]
                for place in [(10, {}), (1, BETWEEN)]
            ),
        ),
    ],
)
def test_so_do_workers(kind, draws, workers, at, flags, tmp_path):
    assert_goes_on(partial(loader, kind, draws, **workers), tmp_path, at, **{"max_epochs": 2, **flags})


@pytest.mark.parametrize(("kind", "workers"), alternating([Augmented, Shards], [WORKERS, STAY]))
def test_so_do_workers_in_the_epochs_after_the_one_that_was_stopped(kind, workers, tmp_path):
    assert_goes_on(partial(loader, kind, lambda: from_globals, **workers), tmp_path, 3, max_epochs=3)


class Lazily(Drawn):
    """Draws which sample comes next, between the samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        left = self.numbers()
        while left:
            yield torch.tensor([float(left.pop(int(torch.randint(len(left), ()))))], dtype=torch.float64)


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


@pytest.mark.parametrize("workers", [{"num_workers": 1}, STAY], ids=["new", "persistent"])
def test_so_does_an_order_that_collation_has_a_part_in(workers, tmp_path):
    """Workers read the stream again with collation, which draws between the samples."""
    assert_goes_on(lambda: DataLoader(Lazily(None), 2, collate_fn=noisy, **workers), tmp_path, 3, max_epochs=3)


def test_an_order_that_the_training_may_have_a_part_in_is_warned_of(tmp_path):
    make = partial(loader, Drawn, lambda: from_globals)
    train(make, callbacks=[SavesIn("on_train_batch_end", 3, tmp_path / "saved")])
    with pytest.warns(UserWarning, match=r"Drawn has no `state_dict`.* if they decide which samples come"):
        train(make, tmp_path / "saved")


def test_a_generator_that_is_made_when_it_is_needed_goes_on():
    class Late:
        def __init__(self, rng: Any = None) -> None:
            self.rng = rng

    for made in (np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator()):
        first, second = Late(made), Late()
        set_own_states(second, OwnGenerators(first).states())
        assert OwnGenerators(second).states().keys() == {"rng"}
        assert str(OwnGenerators(second).states()) == str(OwnGenerators(first).states())


def test_generators_are_found_in_transforms_and_closures():
    rng = np.random.default_rng(1)

    def transform(sample: Any) -> Any:
        return sample + rng.random()

    data = Augmented(partial(transform, other=random.Random(1)))
    assert sorted(OwnGenerators(data).states()) == ["draws.func.rng", "draws.keywords.other"]
