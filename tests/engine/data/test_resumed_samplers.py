"""One process, whole fits: whatever the loader's sampler is, a run that is gone on with was never stopped."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.pairs import alternating, nightly, paired

from ..tiny import Positions, SavesIn, engine
from .runs import Trains, assert_goes_on, train

SIZE = 14


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


class Foreign(Sampler[int]):
    """Draws all its order when it is asked for it."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        return iter(self.draw())


class Private(Foreign):
    """Has a generator that nobody else can seed."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(4)

    def draw(self) -> list[int]:
        return self.draws.permutation(SIZE).tolist()


class Stateful(Foreign):
    """Says itself where its generator is."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(3)

    def draw(self) -> list[int]:
        return torch.randperm(SIZE, generator=self.draws).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.set_state(state["draws"])


class Global(Foreign):
    """Draws from generators that all share."""

    def draw(self) -> list[int]:
        shift = random.randrange(SIZE) + int(np.random.randint(SIZE)) + int(torch.randint(SIZE, ()))
        return [(i + shift) % SIZE for i in range(SIZE)]


class Counting(Foreign):
    """Another order each time, with `set_epoch` to say which."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def draw(self) -> list[int]:
        return [(i + self.epoch) % SIZE for i in range(SIZE)]


class Buckets:
    """A batch sampler that is no BatchSampler: batches of several sizes, from a generator of its own."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(6)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        cuts = [0, 1, 4, 7, 12, SIZE]
        order = self.draws.permutation(SIZE).tolist()
        return iter([order[a:b] for a, b in itertools.pairwise(cuts)])


class Growing:
    """A batch sampler with `set_epoch`: batches of three samples in the first epoch, then of two, then of one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def size(self) -> int:
        return max(1, 3 - self.epoch)

    def __len__(self) -> int:
        return -(-SIZE // self.size)

    def __iter__(self) -> Any:
        return (list(range(i, min(i + self.size, SIZE))) for i in range(0, SIZE, self.size))


class Pairs(BatchSampler):
    """A batch sampler of a class of its own."""


def of(sampler: Any) -> DataLoader:
    return DataLoader(Positions(SIZE), batch_size=3, sampler=sampler)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": lambda: DataLoader(Positions(SIZE), batch_size=3),
    "in order, drop_last": lambda: DataLoader(Positions(SIZE), batch_size=3, drop_last=True),
    "shuffled": lambda: DataLoader(Positions(SIZE), batch_size=3, shuffle=True),
    "shuffled by the loader's generator": lambda: DataLoader(Positions(SIZE), 3, shuffle=True, generator=generator()),
    "shuffled by the sampler's generator": lambda: of(RandomSampler(range(SIZE), generator=generator())),
    "with replacement": lambda: of(RandomSampler(range(SIZE), replacement=True, num_samples=11)),
    "weighted": lambda: of(WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "weighted by a generator": lambda: of(WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator())),
    "subset": lambda: of(SubsetRandomSampler(range(1, SIZE))),
    "a list": lambda: of(list(range(SIZE - 1, -1, -1))),
    "foreign, private": lambda: of(Private()),
    "foreign, stateful": lambda: of(Stateful()),
    "foreign, global": lambda: of(Global()),
    "foreign, set_epoch": lambda: of(Counting()),
    "distributed": lambda: of(DistributedSampler(range(SIZE), num_replicas=1, rank=0)),
    "batches": lambda: DataLoader(Positions(SIZE), batch_sampler=BatchSampler(Private(), 3, False)),
    "batches of a class": lambda: DataLoader(Positions(SIZE), batch_sampler=Pairs(RandomSampler(range(SIZE)), 3, True)),
    "batches by a generator": lambda: DataLoader(
        Positions(SIZE), batch_sampler=Pairs(RandomSampler(range(SIZE), generator=generator()), 3, False)
    ),
    "batches of any length": lambda: DataLoader(Positions(SIZE), batch_sampler=Buckets()),
    "batches of another number in each epoch": lambda: DataLoader(Positions(SIZE), batch_sampler=Growing()),
    "a list of batches": lambda: DataLoader(Positions(SIZE), batch_sampler=[[0, 1], [2], [3, 4, 5], [6, 7], [8]]),
    "torchdata, in order": lambda: StatefulDataLoader(Positions(SIZE), batch_size=3),
    "torchdata, shuffled": lambda: StatefulDataLoader(Positions(SIZE), batch_size=3, shuffle=True),
    "torchdata, by a generator": lambda: StatefulDataLoader(Positions(SIZE), 3, shuffle=True, generator=generator()),
}


PLACES = [(2, "on_train_batch_end"), (7, "on_train_batch_start"), (1, "on_train_epoch_end"), (1, "on_train_start")]
MORE_PLACES = [
    (4, "on_train_batch_end"),
    (6, "on_train_batch_end"),
    (2, "on_train_epoch_start"),
    (2, "on_train_epoch_end"),
]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize(
    ("at", "hook", "name"),
    [*alternating(PLACES, LOADERS), *nightly(*((*place, name) for place in MORE_PLACES for name in LOADERS))],
)
def test_goes_on(name, at, hook, tmp_path):
    assert_goes_on(LOADERS[name], tmp_path, at, hook=hook)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_has_as_many_batches_as_its_batch_sampler_has_then(num_workers):
    seen = train(lambda: DataLoader(Positions(SIZE), batch_sampler=Growing(), num_workers=num_workers))
    sizes = [[len(batch) for epoch, _, batch in seen if epoch == number] for number in range(3)]
    assert sizes == [[3, 3, 3, 3, 2], [2] * 7, [1] * 14]


def test_a_validation_in_mid_epoch_is_due_at_the_epochs_own_share_of_batches():
    done = []

    class Validates(Trains):
        def on_validation_start(self) -> None:
            done.append((self.trainer.current_epoch, len(self.seen)))

    module, flags = Validates(), {"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    train_loader = DataLoader(Positions(SIZE), batch_sampler=Growing())
    engine(max_epochs=2, **flags).fit(module, train_loader, DataLoader(Positions(2)))
    assert done == [(0, 2), (0, 4), (1, 5 + 3), (1, 5 + 6)]


ASKED = {
    **LOADERS,
    "torchdata, in a worker": lambda: StatefulDataLoader(Positions(SIZE), 3, shuffle=True, num_workers=1),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize("name", ASKED)
def test_goes_on_from_a_checkpoint_that_was_saved_after_the_run(name, tmp_path):
    """torchdata's loader, asked for its state when it has no iterator, begins one, which draws the next order."""
    expected = train(ASKED[name])
    first = [item for item in expected if item[0] == 0]
    seed_everything(7, verbose=False)
    module, run = Trains(), engine(max_epochs=3, max_steps=len(first))
    run.fit(module, ASKED[name]())
    before = torch.get_rng_state()
    run.save_checkpoint(tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), before)
    assert module.seen == first
    assert train(ASKED[name], tmp_path / "saved") == expected[len(first) :]


@pytest.mark.parametrize(("at", "persistent"), alternating([2, 6], [False, True]))
def test_goes_on_with_workers_which_fetch_ahead(at, persistent, tmp_path):
    arguments = {"shuffle": True, "num_workers": 1, "persistent_workers": persistent}
    assert_goes_on(lambda: DataLoader(Positions(SIZE), batch_size=3, **arguments), tmp_path, at)


@pytest.mark.parametrize(("batch_size", "limit"), [(7, 1.0), (3, 1.0), (3, 0.5)])
def test_epochs_after_one_that_was_cut_anew_are_whole(batch_size, limit, tmp_path):
    def loader(size):
        return lambda: DataLoader(Positions(101), batch_size=size, shuffle=True)

    train(loader(4), callbacks=[SavesIn("on_train_batch_end", 5, tmp_path / "saved")])
    rest = train(loader(batch_size), tmp_path / "saved", max_epochs=4, limit_train_batches=limit)
    for epoch in (1, 2, 3):
        found = [i for at, _, batch in rest if at == epoch for i in batch]
        expected = int(-(-101 // batch_size) * limit) * batch_size
        assert len(set(found)) == len(found) == min(101, expected)


class Anew(LightningDataModule):
    """Makes a loader each time that it is asked for one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.train_dataloader = LOADERS[name]


ANEW = {
    "a hook": lambda: Anew("shuffled"),
    "a hook, with a generator": lambda: Anew("shuffled by the sampler's generator"),
    "the same loader again": LOADERS["shuffled by the sampler's generator"],
}


@pytest.mark.parametrize("name", ANEW)
@pytest.mark.parametrize(
    ("every", "at", "hook"),
    alternating(
        [1, 2],
        [
            (4, "on_train_batch_end"),
            (1, "on_train_epoch_end"),
            (9, "on_train_batch_end"),
            (2, "on_train_epoch_start"),
            (2, "on_train_epoch_end"),
            (3, "on_train_epoch_start"),
        ],
    ),
)
def test_loaders_are_made_anew_in_the_epochs_of_the_run_that_was_not_stopped(name, every, at, hook, tmp_path):
    """Lightning makes two iterators in such an epoch, and each draws."""
    assert_goes_on(ANEW[name], tmp_path, at, hook=hook, max_epochs=5, reload_dataloaders_every_n_epochs=every)


@pytest.mark.parametrize("name", ANEW)
@pytest.mark.parametrize("at", [6, 7, 16])
def test_a_first_window_that_is_done_again_has_the_order_that_it_had(name, at, tmp_path):
    assert_goes_on(
        ANEW[name], tmp_path, at, max_epochs=4, reload_dataloaders_every_n_epochs=1, accumulate_grad_batches=3
    )


@pytest.mark.parametrize("at", [7, *nightly(11)])
def test_so_are_loaders_whose_workers_read_ahead_for_the_first_iterator(at, tmp_path):
    def load() -> LightningDataModule:
        data = LightningDataModule()
        data.train_dataloader = lambda: DataLoader(Positions(SIZE), 3, shuffle=True, num_workers=1)
        return data

    assert_goes_on(load, tmp_path, at, max_epochs=5, reload_dataloaders_every_n_epochs=1)


class AsksForValidation(LightningDataModule):
    """Notes the epochs in which its validation loader was made."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def train_dataloader(self) -> DataLoader:
        return LOADERS["in order"]()

    def val_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        self.epochs.append(self.trainer.current_epoch)
        return LOADERS["in order"]()


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize(
    ("at", "hook"), [(2, "on_train_batch_end"), (8, "on_train_batch_end"), (3, "on_validation_end")]
)
def test_so_are_validation_loaders(at, hook, sanity_steps, every, tmp_path):
    flags = {"max_epochs": 7, "reload_dataloaders_every_n_epochs": every, "num_sanity_val_steps": sanity_steps}
    whole, resumed = AsksForValidation(), AsksForValidation()
    engine(**flags, callbacks=[SavesIn(hook, at, tmp_path / "saved")]).fit(Trains(), whole)
    engine(**flags).fit(Trains(), resumed, ckpt_path=tmp_path / "saved")
    assert whole.epochs == list(range(0, 7, every))
    first, *later = resumed.epochs  # a resumed run needs loaders at once
    assert later == [epoch for epoch in whole.epochs if epoch > first]


WITH_WORKERS = {
    "torch's, a batch sampler that draws at once": lambda **more: DataLoader(
        Positions(SIZE), batch_sampler=Buckets(), **more
    ),
    "torchdata's, shuffled": lambda **more: StatefulDataLoader(Positions(SIZE), 3, shuffle=True, **more),
    "torchdata's, foreign sampler": lambda **more: StatefulDataLoader(Positions(SIZE), 3, sampler=Private(), **more),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize(
    ("name", "persistent", "at", "hook"),
    paired(WITH_WORKERS, [False, True], [(2, "on_train_batch_end"), (1, "on_train_epoch_end")]),
)
def test_goes_on_with_workers_for_which_each_epoch_draws_two_orders(at, hook, persistent, name, tmp_path):
    """torch makes two iterators for new workers, one for workers that stay; these samplers draw for each of them."""
    assert_goes_on(lambda: WITH_WORKERS[name](num_workers=1, persistent_workers=persistent), tmp_path, at, hook=hook)


class Unsized(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(SIZE))


def test_accumulates_over_a_sampler_without_a_length():
    seen = train(lambda: of(Unsized()), max_epochs=2, accumulate_grad_batches=2)
    assert [i for _, _, batch in seen for i in batch] == 2 * list(range(SIZE))
