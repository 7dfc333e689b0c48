"""Reads streams shard by shard, so that the rest of an epoch can be split over another number of ranks.

Which data sets can be read so: `shardable`.

Assignment of shards: each rank gets a contiguous block of shards (the first ranks one more, if the number does not
divide), as `shard` of Hugging Face does; of these, worker w of n gets the w-th and every n-th after it. The position of
a worker is the number of shards it has finished, the samples it has taken of the current one, and that shard's
`state_dict`, if it has one. A run with other ranks, workers or batch size assigns the unfinished shards in the same
way: a shard that was begun continues at its position, in any worker. A shard without a state is read again up to there;
finished shards are not read again.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from .._compat.torch import WorkerInfo
from .._compat.torch import _utils as torchs
from ..checkpoint.rng import get_random_state, set_random_state
from .clone_loader import DatasetProxy, classes_of_torchdata, clone_loader, is_torchdata_loader
from .own_generators import OwnGenerators, States, set_state_here
from .stateful import StateTrackingLoader, form_in_words, is_hugging_face_dataset, is_stateful
from .stream_loader import OTHER_BATCHES, add_to_digest

__all__ = [
    "ShardedLoader",
    "ShardedStream",
    "digest_of_generators",
    "ends_with_one_source",
    "loses_its_buffer",
    "num_shards_of",
    "padding_batch",
    "read_by_shards",
    "remaining_shards",
    "reread_if_buffered",
    "why_not_dealable",
    "why_not_shardable",
]

Shard = list[Any]
"""A shard that is not finished: its number, the count of its samples that were taken, [its state] or [], and, if it was
begun, the state of the generators at its start, and a checksum of the samples if it has no state."""


def read_by_shards(loader: DataLoader, num_ranks: int, rank: int) -> DataLoader | None:
    """Returns a copy of a loader that reads this rank's part of its stream shard by shard; None if it can't."""
    standard = DataLoader, *classes_of_torchdata("stateful_dataloader", "StatefulDataLoader")
    if type(loader) not in standard or not loader.in_order or why_not_shardable(loader.dataset):
        return None
    if (num_shards_of(loader.dataset) or 0) < num_ranks:
        return None
    attributes: dict[str, Any] = {"snapshot_every_n_steps": 1} if is_torchdata_loader(loader) else {}
    return clone_loader(loader, dataset=ShardedStream(loader.dataset, num_ranks, rank), **attributes)


class ShardedStream(DatasetProxy):
    """Reads one rank's part of a stream shard by shard.

    Args:
        dataset: the user's.
        num_ranks: number of ranks that share it.
        rank: this rank.
    """

    def __init__(self, dataset: Any, num_ranks: int, rank: int) -> None:
        super().__init__(dataset)
        self._own = OwnGenerators(dataset)
        self.num_ranks, self.rank = num_ranks, rank
        self.dealt: list[list[Shard]] | None = None
        """The unfinished shards of an epoch that another run began, by worker; None in an epoch of this run's own."""
        self._next: list[list[Shard]] | None = None
        self._loaded: dict[str, Any] | None = None
        self._before, self._at, self._count = 0, 0, 0
        self._digest = 0
        self._state: list[Any] = []
        self._part: Any = None
        self._first: States | None = None
        """The states of the generators when this worker began."""
        self._start: Any = None
        self._block: tuple[range, Any] = (range(0), None)

    @property
    def count(self) -> int:
        """Number of shards of the stream."""
        number = num_shards_of(self.dataset)
        assert number is not None
        return number

    def deal_next(self, dealt: list[list[Shard]] | None) -> None:
        """Sets the shards that each worker reads in the next epoch."""
        self._next = dealt

    def begin_epoch(self) -> None:
        """Called in the main process before the loader makes an iterator."""
        self.dealt, self._next = self._next, None

    def __iter__(self) -> Iterator[Any]:
        start, self._loaded = self._loaded or _START, None
        worker = torch.utils.data.get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shards = _dealt(self.dealt, self.count, self.num_ranks, self.rank, num_workers, number)
        if worker is not None:
            self.dealt = None  # it may stay for later epochs, which are whole
        self._before, self._at, self._part = start["at"], start["at"], None
        self._count, self._state, self._digest = start["count"], start["state"], start["digest"]
        self._block = range(0), None  # the epoch of the data set may have changed
        if self._first is None and worker is not None:
            self._first = self._own.here()
        left, now = _after(shards, start), start["now"]
        if not left and now is not None:  # a loader does not continue a worker that had finished
            set_state_here(self.dataset, now)
        return self._read(left, worker, now)

    def _read(self, shards: list[Shard], worker: Any, now: Any) -> Iterator[Any]:
        end = object()
        for number, (index, count, state, *begun) in enumerate(shards):
            self._at, self._count, self._state = self._before + number, count, state
            start, digest = begun or (None, 0)
            states = self._start = self._own.here().plain()
            if count and start is not None:
                self._start = start
                set_state_here(self.dataset, start)
            with _alone(worker):
                if count and not state:
                    part, samples = self._read_again(index, count, digest)
                else:
                    part, samples = self._open(index, state)
            if count or now is not None:
                set_state_here(self.dataset, now or states)
            now = None
            self._part = part if is_stateful(part) and not loses_its_buffer(part) else None
            while True:
                with _alone(worker):
                    sample = next(samples, end)
                if sample is end:
                    break
                self._count += 1
                if self._part is None:
                    self._digest = add_to_digest(self._digest, sample)
                yield sample
        self._at, self._count, self._state, self._part = self._before + len(shards), 0, [], None
        self._start = None

    def _open(self, index: int, state: list[Any]) -> tuple[Any, Iterator[Any]]:
        """Returns a shard and its iterator, at its start or at its state."""
        part, self._digest = self._shard(index), 0
        if state:
            # Hugging Face: ignores a state of another epoch, on which these shards don't depend.
            same = {"epoch": part.epoch} if is_hugging_face_dataset(part) else {}
            part.load_state_dict({**state[0], **same} if same else state[0])
        return part, iter(part)

    def _read_again(self, index: int, count: int, digest: int) -> tuple[Any, Iterator[Any]]:
        """Returns a shard without a state, and its iterator after the first `count` samples.

        Args:
            index: index of the shard.
            count: number of samples that the saved run has taken of the shard.
            digest: the checksum of these samples.

        Raises:
            ValueError: the shard has fewer samples, or yields other samples each time.
        """
        remaining = self._skip(index, count)
        read_first = self._digest
        if digest == read_first:
            return remaining
        # Other code may have drawn from the generators between these samples. Read alone, the shard then yields the
        # same samples twice.
        set_state_here(self.dataset, self._start)
        remaining = self._skip(index, count)
        name = type(self.dataset).__name__
        if self._digest != read_first:
            raise ValueError(OTHER_BATCHES.format(name=f"A shard of {name}"))
        rank_zero_warn(
            f"Shard {index} of {name} has no `state_dict`, and was read again up to its place. It draws random numbers"
            " from global generators between its samples, as others do: if they decide which samples come, other ones"
            " come now. Give it a generator of its own, or a `state_dict` and `load_state_dict`."
        )
        return remaining

    def _skip(self, index: int, count: int) -> tuple[Any, Iterator[Any]]:
        part, samples = self._open(index, [])
        taken = 0
        for sample in islice(samples, count):
            self._digest, taken = add_to_digest(self._digest, sample), taken + 1
        if taken < count:
            raise ValueError(
                f"Shard {index} of {type(self.dataset).__name__} has fewer than the {count} samples that were"
                " taken of it before the checkpoint: use the same data, or load only the weights."
            )
        return part, samples

    def _shard(self, index: int) -> Any:
        """Returns one shard; Hugging Face's through a block of shards, since taking one of n takes O(n)."""
        size = self.count
        if not is_hugging_face_dataset(self.dataset):
            return self.dataset.shard(num_shards=size, index=index)
        if index not in self._block[0]:
            num = math.isqrt(size)
            blocks = (range(size)[_block(size, num, number)] for number in range(num))
            number, block = next((number, block) for number, block in enumerate(blocks) if index in block)
            self._block = block, self.dataset.shard(num_shards=num, index=number)
        block, dataset = self._block
        return dataset.shard(num_shards=len(block), index=index - block.start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this worker, and the generators' states now and at the start of the current shard."""
        state = self._state if self._part is None else [self._part.state_dict()]
        position = {"at": self._at, "count": self._count, "state": state, "start": self._start, "now": None}
        position["digest"] = self._digest
        if self._first is None or (now := self._own.here()) == self._first:
            return position
        return {**position, "now": now.plain()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iterator continue at a position."""
        self._loaded = state

    def deal(self, left: list[Shard], num_workers: int) -> list[list[Shard]]:
        """Returns this rank's part of the unfinished shards of an epoch, by worker."""
        share = left[_block(len(left), self.num_ranks, self.rank)]
        return [share[number :: max(1, num_workers)] for number in range(max(1, num_workers))]


class ShardedLoader(StateTrackingLoader):
    """A loader of `ShardedStream` that keeps the positions of its workers."""

    dataset: ShardedStream
    applies_again, keeps_draws = False, True

    @property
    def has_cross_epoch_state(self) -> bool:
        """False: an epoch does not depend on earlier ones, since each one makes its shards again."""
        return False

    def place_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns the positions, with the number of shards and how this epoch's shards were dealt."""
        shards = {"num_shards": self.dataset.count, "dealt": self.dataset.dealt}
        return {**super().place_after(epoch, batches), "shards": shards}

    def resume_rest(
        self, state: dict[str, Any], *, is_same: bool, epoch: int, saved: int, num_ranks: int, window: int
    ) -> int:
        """Resumes at the position of a run, or with this rank's part of the shards that all of its ranks have left.

        Args:
            state: state of the saved run's loader, on this rank; its entry ``of_ranks`` has those of all ranks.
            is_same: the numbers of ranks and workers and the batch size are those of the saved run.
            epoch: the current epoch.
            saved: number of batches of the epoch that each rank of the saved run had done.
            num_ranks: number of this run's ranks.
            window: number of batches of an optimizer step.

        Returns:
            The number of batches of this run that count as done: those that hold as many samples as the saved run's.

        Raises:
            ValueError: the data has another number of shards, or there are other training loaders beside this one.
        """
        states = state["of_ranks"]
        then, now = state["shards"]["num_shards"], self.dataset.count
        if then != now:
            raise ValueError(
                f"The checkpoint has positions in {then} shards, but this run's {type(self.dataset.dataset).__name__}"
                f" has {now}: use the same data, or load only the weights to begin an epoch."
            )
        # If a rank had read all of its shards, the remaining shards of the others are distributed over all ranks.
        has_ended = any(stream["state"] is not None and stream["state"]["ended"] for stream in states)
        if is_same and not has_ended:
            self.dataset.deal_next(state["shards"]["dealt"])
            self.resume(epoch, saved, state["state"])
            return saved
        if not state["is_alone"]:
            raise ValueError(
                "The checkpoint has the position in a stream with shards beside other training loaders, whose shards"
                f" can't be distributed again: resume with {len(states)} rank(s), {form_in_words(state)}, from a"
                " checkpoint in which no loader has ended; or at the end of an epoch; or load only the weights."
            )
        samples = saved * len(states) * (state["batch_size"] or 1)
        batches = samples // (num_ranks * (self.batch_size or 1))
        batches = max(window, batches // window * window)  # an optimizer step begins with the next one
        self.dataset.deal_next(self.dataset.deal(remaining_shards(states, now), self.num_workers))
        self.begin(epoch, batches)
        return batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.dataset.begin_epoch()
        return super().__iter__()


_START: dict[str, Any] = {"at": 0, "count": 0, "state": [], "start": None, "now": None, "digest": 0}


def remaining_shards(states: list[dict[str, Any]], num_shards: int) -> list[Shard]:
    """Returns the unfinished shards of an epoch, sorted by number, with their positions.

    Args:
        states: the states of all ranks' loaders, in rank order: `num_workers`, the shards `dealt`, and the `state`
            of a `StateTrackingLoader`.
        num_shards: number of shards of the data set.
    """
    left: list[Shard] = []
    for rank, state in enumerate(states):
        num_workers = max(1, state["num_workers"])
        for number, position in enumerate(_places(state["state"], num_workers)):
            left += _after(
                _dealt(state["shards"]["dealt"], num_shards, len(states), rank, num_workers, number), position
            )
    return sorted(left, key=lambda shard: shard[0])


def _places(state: dict[str, Any] | None, num_workers: int) -> list[dict[str, Any]]:
    """Returns the position of each worker in a `StateTrackingLoader`'s state."""
    if state is None:
        return [_START] * num_workers
    # The format of the states of iterators, ours and torchdata's, without and with workers.
    loaders = state["state"]
    if "_snapshot" not in loaders:
        return [loaders["dataset_state"]]
    workers = loaders["_snapshot"]["_worker_snapshots"]
    return [workers[f"worker_{number}"]["dataset_state"] for number in range(num_workers)]


def _dealt(
    dealt: list[list[Shard]] | None, num_shards: int, num_ranks: int, rank: int, num_workers: int, worker: int
) -> list[Shard]:
    """Returns the shards of a worker at the start of its epoch."""
    if dealt is not None:
        return dealt[worker]
    block = range(num_shards)[_block(num_shards, num_ranks, rank)]
    return [[index, 0, []] for index in block[worker::num_workers]]


def _after(shards: list[Shard], position: dict[str, Any]) -> list[Shard]:
    """Returns the shards that a worker has not finished at a position."""
    left = shards[position["at"] :]
    if left and position["count"]:
        left[0] = [left[0][0], position["count"], position["state"], position["start"], position["digest"]]
    return left


def _block(size: int, num_ranks: int, rank: int) -> slice:
    """Returns a rank's contiguous block of `size` items; the blocks differ by at most one item."""
    share, more = divmod(size, num_ranks)
    start = share * rank + min(rank, more)
    return slice(start, start + share + (rank < more))


@contextmanager
def _alone(worker: Any) -> Iterator[None]:
    """Context in which a data set in a worker finds no other workers, since the engine has assigned the shards."""
    if worker is None:
        yield
        return
    torchs.worker._worker_info = WorkerInfo(id=0, num_workers=1, seed=worker.seed, dataset=worker.dataset)
    try:
        yield
    finally:
        torchs.worker._worker_info = worker


def padding_batch(loader: DataLoader) -> Any:
    """Returns a batch for a rank that has none left of an epoch: it runs it for its collectives only."""
    shards: Any = loader.dataset
    before = get_random_state()
    first = DataLoader(ShardedStream(shards.dataset, 1, 0), loader.batch_size, collate_fn=loader.collate_fn)
    batch = next(iter(first))
    set_random_state(before)
    return batch


# --- resumes streams whose state leaves out the examples in a shuffle buffer: reads them again from the epoch's start
# Hugging Face's `IterableDataset.shuffle` reads ahead into a buffer, and its `state_dict` counts the buffer's examples
# as read. A pass over it depends on its epoch and the states of its generators only, so reading again up to the
# position is exact; it takes the time of reading.


class _Replayed(DatasetProxy):
    """A Hugging Face data set without its `state_dict`, so that a loader reads it again up to its position."""

    _lacks = ("state_dict", "load_state_dict")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def reread_if_buffered(loader: DataLoader) -> DataLoader:
    """Returns `loader`; or, if its stream is Hugging Face's with a shuffle buffer, a copy that reads it again."""
    dataset: Any = loader.dataset
    # Not for a class of the user's that contains such a stream: its own state may be complete.
    if is_hugging_face_dataset(dataset) and loses_its_buffer(dataset):
        return clone_loader(loader, dataset=_Replayed(dataset))
    return loader


def loses_its_buffer(dataset: Any) -> bool:
    """Whether the state of a data set leaves out the examples in a shuffle buffer."""
    # Hugging Face: BufferShuffledExamplesIterable
    names = {cls.__name__ for iterable in _iterables_of(dataset) for cls in type(iterable).__mro__}
    return is_stateful(dataset) and "BufferShuffledExamplesIterable" in names


def digest_of_generators(dataset: Any) -> int | None:
    """Returns a checksum of the generators that draw the order of a Hugging Face data set; None without any."""
    values = [value for iterable in _iterables_of(dataset) for value in vars(iterable).values()]
    states = [repr(value.bit_generator.state) for value in values if isinstance(value, np.random.Generator)]
    return zlib.crc32("".join(states).encode()) if states else None


def _iterables_of(dataset: Any) -> list[Any]:
    """Returns the iterables that a Hugging Face data set consists of, also if it is within another data set."""
    iterables: dict[int, Any] = {}
    waiting = [(dataset, False)]
    while waiting:
        candidate, is_iterable = waiting.pop()
        if id(candidate) in iterables or not hasattr(candidate, "__dict__"):
            continue
        iterables[id(candidate)] = candidate if is_iterable else None
        attributes = vars(candidate)
        waiting += [(value, False) for value in attributes.values() if isinstance(value, IterableDataset)]
        # Hugging Face: what its data sets, and its examples iterables, read from.
        inner = [attributes[name] for name in ("_ex_iterable", "ex_iterable") if name in attributes] + [
            *attributes.get("ex_iterables", ())
        ]
        waiting += [(value, True) for value in inner]
    return [candidate for candidate in iterables.values() if candidate is not None]


# --- which streams can be read shard by shard, and by several ranks together
# The contract of a data set: `num_shards` (or `n_shards`), a method ``shard(num_shards, index)``, and the class
# attribute ``shards_in_order = True``: iterating the data set yields the samples of ``shard(num_shards, 0)``, then
# those of ``shard(num_shards, 1)``, and so on. Hugging Face's streams satisfy it unless they mix shards, see
# `why_not_shardable`.


_IN_ORDER = (
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "SelectColumnsIterable",
    "FormattedExamplesIterable",
)
"""Hugging Face: iterables that yield several shards one after the other, each shard as they yield it alone."""


def num_shards_of(dataset: Any) -> int | None:
    """Returns the number of shards of a data set; None if it has no such attribute."""
    number = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return number if isinstance(number, int) else None


def why_not_shardable(dataset: Any) -> str | None:
    """Returns why a data set can't be read shard by shard; None if it can."""
    name = type(dataset).__name__
    if hasattr(dataset, "__len__"):
        return f"{name} has a `__len__`, which would be wrong for an epoch that is redistributed"
    if not callable(getattr(dataset, "shard", None)) or not num_shards_of(dataset):
        return f"{name} has no `num_shards` and `shard(num_shards, index)`"
    if not is_hugging_face_dataset(dataset):
        says_so = getattr(dataset, "shards_in_order", False)
        return None if says_so else f"{name} doesn't say `shards_in_order = True`"
    if dataset._distributed is not None:  # Hugging Face: set by split_dataset_by_node
        return "`split_dataset_by_node` has given each rank its own part, but the engine splits the data itself"
    if getattr(dataset._formatting, "is_table", False):
        return "it yields tables of several samples"
    iterable = dataset._ex_iterable
    while iterable is not None:
        if type(iterable).__name__ not in _IN_ORDER:
            return f"its shards are mixed, or cut, by Hugging Face's {type(iterable).__name__}"
        for flag in ("batched", "with_indices", "drop_last_batch"):
            if getattr(iterable, flag, False):
                return f"its `map` or `filter` with {flag}=True depends on where shards begin"
        iterable = getattr(iterable, "ex_iterable", None)
    return None


def why_not_dealable(dataset: Any) -> str | None:
    """Returns why ranks that share a data set's shards would together read other samples than one rank; or None.

    Hugging Face divides the number of `take` and `skip` by the number of ranks, and each rank counts in its own
    shards; the same holds for the indices of a `filter`.
    """
    for iterable in _iterables_of(dataset):
        name = type(iterable).__name__
        if name in ("TakeExamplesIterable", "SkipExamplesIterable") and getattr(iterable, "split_when_sharding", True):
            return "take" if name.startswith("Take") else "skip"
        if name == "FilteredExamplesIterable" and getattr(iterable, "with_indices", False):
            return "filter(..., with_indices=True)"
    return None


def ends_with_one_source(dataset: Any) -> bool:
    """Whether a data set mixes sources until the first source, or the last one, has ended.

    Each rank mixes its own shards. So the ranks together read other samples, or repeat other samples, than one process.
    """
    strategies = {getattr(iterable, "stopping_strategy", None) for iterable in _iterables_of(dataset)}
    return not strategies.isdisjoint(("first_exhausted", "all_exhausted"))  # Hugging Face: interleave_datasets
