"""One process, whole fits: data without an order to deal, and several loaders at once, are gone on with exactly."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.pairs import alternating, nightly

from ..tiny import CountingStream, Positions, SavesIn, Stream, engine
from .runs import Trains, assert_goes_on, combined, train

SIZE = 14


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


class Split(IterableDataset[int]):
    """Its numbers are dealt to the loader's workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id if worker else 0, SIZE, worker.num_workers if worker else 1))


class Endless(IterableDataset[int]):
    """Goes on counting in each epoch, and says where it is."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        self.at += 1
        yield self.at
        while self.at % SIZE:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Pending(IterableDataset[int]):
    """As Hugging Face's: what is loaded waits for the next iterators, for all of them."""

    loaded: dict[str, int] | None = None
    state: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.state = {"at": 0} if self.loaded is None else dict(self.loaded)
        while self.state["at"] < SIZE:
            self.state["at"] += 1
            yield self.state["at"]

    def state_dict(self) -> dict[str, int] | None:
        return None if self.state is None else dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def plain() -> DataLoader[int]:
    return DataLoader(Stream(SIZE), batch_size=3)


def ordered(size: int, shuffle: bool = True) -> DataLoader[int]:
    return DataLoader(Positions(size), batch_size=3, shuffle=shuffle)


LOADERS: dict[str, Any] = {
    "a stream": plain,
    "a stream, drop_last": lambda: DataLoader(Stream(SIZE), batch_size=3, drop_last=True),
    "a stream of two workers": lambda: DataLoader(Split(), batch_size=3, num_workers=2),
    "torchdata's": lambda: StatefulDataLoader(Stream(SIZE), batch_size=3),
    "with a state of its own": lambda: StatefulDataLoader(Endless(), batch_size=3),
    "with a state that waits": lambda: DataLoader(Pending(), batch_size=3),
    "with a state that waits, in a worker": lambda: DataLoader(Pending(), batch_size=3, num_workers=1),
    "two streams": lambda: {"a": plain(), "b": DataLoader(Stream(9), batch_size=2)},
    "a stream beside an order": lambda: combined("min_size", a=plain(), b=ordered(SIZE)),
    "the longer of two": lambda: combined("max_size_cycle", a=ordered(SIZE), b=ordered(7)),
    "the shorter of two": lambda: combined("min_size", a=ordered(SIZE), b=ordered(20)),
    "until both are over": lambda: combined("max_size", a=ordered(SIZE), b=ordered(7)),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize(
    ("at", "flags", "name"),
    [
        *alternating([(2, {}), (4, {"accumulate_grad_batches": 3}), (1, {"hook": "on_train_epoch_end"})], LOADERS),
        *nightly(*((*at, name) for at in [(6, {}), (2, {"hook": "on_train_epoch_start"})] for name in LOADERS)),
    ],
)
def test_goes_on(name, at, flags, tmp_path):
    assert_goes_on(LOADERS[name], tmp_path, at, **flags)


@pytest.mark.parametrize("at", [2, 6])
def test_after_a_limited_epoch_a_state_that_waits_does_not_wait_any_more(at, tmp_path):
    flags = {"limit_train_batches": 4}
    whole = train(
        lambda: DataLoader(Pending(), 3), callbacks=[SavesIn("on_train_batch_end", at, tmp_path / "s")], **flags
    )
    assert train(lambda: DataLoader(Pending(), 3), tmp_path / "s", **flags) == whole[at:]


def test_a_state_in_workers_that_stay_is_refused(tmp_path):
    def loader():
        return DataLoader(Pending(), batch_size=3, num_workers=1, persistent_workers=True)

    train(loader, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "s")])
    with pytest.raises(ValueError, match=r"Pending has a state of its own, in workers that stay .*=False"):
        train(loader, tmp_path / "s")


def _anew(dataset: Any) -> Callable[[], LightningDataModule]:
    """Asks for a loader in each epoch, over a new data set or over the same one."""

    def make() -> LightningDataModule:
        data, kept = LightningDataModule(), CountingStream(SIZE)
        data.train_dataloader = lambda: DataLoader(kept if dataset is None else dataset(SIZE), batch_size=3)
        return data

    return make


@pytest.mark.parametrize("dataset", [CountingStream, None])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("at", "hook"), [(7, "on_train_batch_end"), (1, "on_train_epoch_end"), (2, "on_train_epoch_end")]
)
def test_a_loader_made_anew_loses_nothing_to_its_first_iterator(at, hook, every, dataset, tmp_path):
    """Lightning makes two of them, and fetches a batch from the first."""
    flags = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": every}
    seen = train(_anew(dataset), **flags)
    assert [i for _, _, batch in seen for i in batch] == 4 * list(range(SIZE))
    assert_goes_on(_anew(dataset), tmp_path, at, hook=hook, **flags)


class Counted(IterableDataset[int]):
    """Notes in a file, which workers share, each number that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        for number in range(5):
            with self.path.open("a") as file:
                file.write(".")
            yield number


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_more_is_read_than_is_trained_on(num_workers, tmp_path):
    counted = tmp_path / "counted"

    def fit(max_epochs: int, ckpt_path: Path | None = None) -> Any:
        run, loader = engine(max_epochs=max_epochs), DataLoader(Counted(counted), num_workers=num_workers)
        run.fit(Trains(), loader, ckpt_path=ckpt_path)
        return run

    fit(2).save_checkpoint(tmp_path / "saved.ckpt")  # when the workers are gone
    fit(4, tmp_path / "saved.ckpt")
    assert len(counted.read_text()) == 4 * 5


class Unsized:
    """Batches, of which nobody knows the number."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(range(SIZE), 3, False))


class Batches:
    """An iterable of batches, and nothing else."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1], [2]])


class AsksForMore(Stream):
    """Its state is for a loader of its own."""

    def state_dict(self, num_yielded: int) -> dict[str, int]:
        raise AssertionError("never called without an argument")

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


NOWHERE: dict[str, Any] = {
    "batches without a number": (lambda: DataLoader(Positions(SIZE), batch_sampler=Unsized()), "over a Positions"),
    "an iterable": (Batches, "this run's Batches can't continue"),
    "a state that can't be asked for": (lambda: DataLoader(AsksForMore(SIZE), 3), "over a AsksForMore"),
}


@pytest.mark.filterwarnings("ignore:The state_dict of AsksForMore can't be asked for")
@pytest.mark.parametrize("name", NOWHERE)
def test_data_that_cannot_say_where_they_were_are_refused_in_mid_epoch(name, tmp_path):
    make, message = NOWHERE[name]
    train(make, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "s")])
    with pytest.raises(ValueError, match=f"saved after 2 batches of the epoch, .*{message}"):
        train(make, tmp_path / "s")


class ByTheClock(IterableDataset[int]):
    """Draws its order as webdataset's `shuffle` does without a seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(time.time_ns()).sample(range(SIZE * 5), SIZE))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],
    ids=["none", "one", "one that stays"],
)
def test_a_stream_that_draws_another_order_when_it_is_read_again_is_refused(workers, loader, tmp_path):
    """Samples would be left out, and others repeated."""

    def load() -> DataLoader:
        return loader(ByTheClock(), 3, **workers)

    train(load, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "saved")], max_epochs=1)
    text = r"ByTheClock has no `state_dict`, .* has yielded other batches than .* if only the augmentation draws so"
    with pytest.raises(ValueError, match=text):
        train(load, tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:The state_dict of AsksForMore can't be asked for")
@pytest.mark.parametrize("name", NOWHERE)
def test_they_go_on_after_the_last_batch_of_an_epoch(name, tmp_path):
    make, _ = NOWHERE[name]
    at = len(train(make)) // 3
    assert_goes_on(make, tmp_path, at)


def test_a_state_that_cannot_be_asked_for_is_a_warning():
    with pytest.warns(UserWarning, match=r"state_dict of AsksForMore can't be asked for .*TypeError: .*Use the loader"):
        train(lambda: DataLoader(AsksForMore(SIZE), 3))


class LikeLitdatas(DataLoader):
    """Keeps its place as litdata 0.2.76's own loader does: by a flag that only a pass read to its end clears."""

    restore, done = False, 0

    def __iter__(self) -> Iterator[Any]:
        if not self.restore:
            self.done = 0
        for batch in itertools.islice(super().__iter__(), self.done, None):
            self.done += 1
            yield batch
        self.restore = False

    def __len__(self) -> int:
        return -(-SIZE // 3)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self.restore = state["done"], True


LikeLitdatas.__module__ = "litdata.streaming.dataloader"


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("at", [2, 5, 6])
def test_litdatas_own_loader(at, tmp_path):
    """The epochs after the resumed one are whole; a checkpoint may be of an epoch's last batch, too."""
    kind = type("StreamingDataset", (Stream,), {"__module__": "litdata.streaming.dataset"})
    assert_goes_on(lambda: LikeLitdatas(kind(SIZE), batch_size=3), tmp_path, at)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_litdatas_other_data_sets_are_refused(tmp_path):
    def make() -> Any:
        return LikeLitdatas(Stream(SIZE), batch_size=3)

    train(make, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "saved")])
    with pytest.raises(ValueError, match=r"litdata's LikeLitdatas over a Stream can't continue where it was"):
        train(make, tmp_path / "saved")
