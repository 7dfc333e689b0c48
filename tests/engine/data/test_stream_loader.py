"""Streams that are read with their place: batches as torch's, and a place that any other loader continues from."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data.stream_loader import StreamLoader, can_be_read
from tests.pairs import alternating, paired

from ..tiny import SavesIn, Stream
from .runs import train

SIZE = 14


class Split(IterableDataset[int]):
    """Its numbers are shared by two workers, ten for the first."""

    def numbers(self) -> list[int]:
        worker: Any = get_worker_info()
        if worker is None:
            return list(range(SIZE))
        assert worker.dataset is self, "a worker knows the user's data set"
        return list(range(10)) if worker.id == 0 else list(range(10, SIZE))

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())


class Stated(Split):
    """Begins anew once it is through."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class _Place:
    """An iterator that says where it is."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> "_Place":
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatedIterator(Split):
    def __iter__(self) -> Iterator[int]:
        return _Place(self.numbers())


class Drawn(Split):
    """Its order is drawn when it is iterated, and its samples are augmented."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.tensor(self.numbers())
        return (i + torch.rand(()) / 2 for i in numbers[torch.randperm(len(numbers))])


KINDS = [Split, Stated, StatedIterator, Drawn]
HOW: list[dict[str, Any]] = [
    {"batch_size": 3},
    {"batch_size": 3, "num_workers": 2},
    {"batch_size": 3, "num_workers": 2, "drop_last": True},
    {"batch_size": None, "num_workers": 2},
]


def batches(loader: Any, num: int | None = None) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in islice(loader, num)]


@pytest.mark.parametrize(("kind", "how"), alternating(KINDS, [*HOW, {**HOW[1], "persistent_workers": True}]))
def test_the_batches_and_the_draws_are_torchs(kind, how):
    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = cls(kind(), **how)
        return [*(batches(loader) for _ in range(2)), torch.rand(2).tolist()]

    assert epochs(StreamLoader) == epochs(DataLoader)


@pytest.mark.parametrize(("kind", "how"), alternating(KINDS, HOW))
@pytest.mark.parametrize("places", [slice(0, None, 4), pytest.param(slice(0, None), marks=pytest.mark.nightly)])
def test_each_place_is_continued_from(kind, how, places):
    torch.manual_seed(3)
    whole = batches(StreamLoader(kind(), **how))
    for num in range(1, len(whole) + 1)[places]:
        torch.manual_seed(3)
        iterator = iter(loader := StreamLoader(kind(), **how))
        assert batches(iterator, num) == whole[:num]
        other = StreamLoader(kind(), **how)
        other.load_state_dict(loader.state_dict())
        if how.get("num_workers") is None:
            torch.manual_seed(3)  # as the engine sets it; the seed of workers is a part of the state
        assert batches(other) == whole[num:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, of torch
@pytest.mark.parametrize(
    ("kind", "how", "then", "now"),
    paired(
        [Split, Stated, StatedIterator],
        HOW[:2],
        [(StreamLoader, StatefulDataLoader), (StatefulDataLoader, StreamLoader)],
    ),
)
def test_a_place_is_torchdatas(kind, how, then, now, caplog):
    caplog.set_level(logging.ERROR)
    whole = batches(DataLoader(kind(), **how))
    iterator = iter(first := then(kind(), **how))
    assert batches(iterator, 2) == whole[:2]
    second = now(kind(), **how)
    second.load_state_dict(first.state_dict())
    assert batches(second) == whole[2:]
    assert batches(second) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, of torch
def test_a_place_between_torchdatas_snapshots(caplog):
    caplog.set_level(logging.ERROR)
    whole = batches(DataLoader(Stated(), **HOW[1]))
    iterator = iter(first := StatefulDataLoader(Stated(), **HOW[1], snapshot_every_n_steps=3))
    batches(iterator, 4)
    second = StreamLoader(Stated(), **HOW[1])
    second.load_state_dict(first.state_dict())
    assert batches(second) == whole[4:]


def test_a_worker_that_was_through_is_not_read_again():
    whole = batches(loader := StreamLoader(Stated(), **HOW[1]))
    iterator = iter(loader)
    assert batches(iterator, 5) == whole[:5]  # the second worker has ended
    other = StreamLoader(Stated(), **HOW[1])
    other.load_state_dict(loader.state_dict())
    assert batches(other) == whole[5:]


@pytest.mark.parametrize("how", [*HOW, {**HOW[1], "persistent_workers": True}])
def test_the_place_at_the_end_is_the_start_of_an_epoch(how):
    whole = batches(loader := StreamLoader(Stated(), **how))
    other = StreamLoader(Stated(), **how)
    other.load_state_dict(loader.state_dict())
    assert batches(other) == whole


def test_workers_that_stay_begin_an_epoch_at_their_places():
    how = {**HOW[1], "persistent_workers": True}
    whole = batches(loader := StreamLoader(StatedIterator(), **how))
    batches(iter(loader), 1)  # the other worker's place is that of its start
    other = StreamLoader(StatedIterator(), **how)
    other.load_state_dict(loader.state_dict())
    assert batches(other) == whole[1:]


@pytest.mark.nightly
def test_workers_that_are_spawned():
    how: dict[str, Any] = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "spawn"}
    assert batches(StreamLoader(Stream(SIZE), **how)) == batches(DataLoader(Stream(SIZE), 3))


def test_a_worker_calls_the_users_function():
    def begin(worker: int) -> None:
        torch.manual_seed(worker)

    def read(cls: Any) -> list[Any]:
        return batches(cls(Drawn(), batch_size=3, num_workers=2, worker_init_fn=begin))

    assert read(StreamLoader) == read(DataLoader)


class Fails(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise OSError("no such file")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_stream_raises(num_workers):
    with pytest.raises(OSError, match="no such file"):
        batches(StreamLoader(Fails(), num_workers=num_workers))


class Counted(Stream):
    num_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.num_begun += 1
        return super().__iter__()


def test_asking_for_the_place_begins_nothing():
    loader = StreamLoader(Counted(SIZE), batch_size=3)
    assert loader.state_dict() == {}
    loader.load_state_dict({"loaded": True})
    assert loader.state_dict() == {"loaded": True}
    loader.load_state_dict({})
    assert batches(loader) == batches(DataLoader(Stream(SIZE), 3))
    assert loader.dataset.num_begun == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_is_shorter_than_then_is_refused(num_workers):
    iterator = iter(loader := StreamLoader(Stream(SIZE), batch_size=3, num_workers=num_workers))
    batches(iterator, 3)
    other = StreamLoader(Stream(4), batch_size=3, num_workers=num_workers)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="Stream has 2 batches, but 3 were read before the checkpoint: use"):
        iter(other)


def test_what_has_no_place():
    assert can_be_read(DataLoader(Stream(SIZE), in_order=False))
    assert not can_be_read(DataLoader(Stream(SIZE), in_order=False, num_workers=2))
    assert can_be_read(DataLoader(IterableWrapper(range(SIZE))))
    assert not can_be_read(DataLoader(IterableWrapper(range(SIZE)), num_workers=2))


def test_batches_of_workers_in_any_order_are_refused_in_mid_epoch(tmp_path):
    def make() -> Any:
        return DataLoader(Split(), batch_size=3, num_workers=2, in_order=False)

    train(make, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "s")])
    with pytest.raises(ValueError, match=r"saved after 2 batches of the epoch, .*over a Split"):
        train(make, tmp_path / "s")
