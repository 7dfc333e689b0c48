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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from .._compat.torch import WorkerInfo
from .._compat.torch import _utils as torchs
from ..checkpoint.rng import get_random_state, set_random_state
from .batch_digest import OTHER_BATCHES, add_to_digest
from .clone_loader import clone_loader
from .drawing import is_same_state
from .own_generators import OwnGenerators, set_state_here
from .replayed import loses_its_buffer
from .shardable import num_shards_of, why_not_shardable
from .stand_in import DatasetProxy
from .stateful import StateTrackingLoader, is_hugging_face_dataset, is_stateful
from .torchdatas import classes_of_torchdata, is_torchdata_loader

__all__ = ["ShardedLoader", "ShardedStream", "padding_batch", "read_by_shards", "remaining_shards"]

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
        self._first: Any = None
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
            self._first = self._own.state_here()
        left, now = _after(shards, start), start["now"]
        if not left and now is not None:  # a loader does not continue a worker that had finished
            set_state_here(self.dataset, now)
        return self._read(left, worker, now)

    def _read(self, shards: list[Shard], worker: Any, now: Any) -> Iterator[Any]:
        end = object()
        for number, (index, count, state, *begun) in enumerate(shards):
            self._at, self._count, self._state = self._before + number, count, state
            start, digest = begun or (None, 0)
            states = self._start = self._own.state_here()
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
        if self._first is None or is_same_state(now := self._own.state_here(), self._first):
            return position
        return {**position, "now": now}

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

    def shards_state(self) -> dict[str, Any]:
        """Returns the state beside the positions: the number of shards, and how this epoch's shards were dealt."""
        return {"num_shards": self.dataset.count, "dealt": self.dataset.dealt}

    def go_on_with(self, epoch: int, batches: int, left: list[Shard]) -> None:
        """Makes the next iterator read this rank's part of the unfinished shards, after `batches` batches."""
        self.dataset.deal_next(self.dataset.deal(left, self.num_workers))
        self.begin(epoch, batches)

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
