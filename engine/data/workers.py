"""Tracks the random states of a loader's workers, so that a resumed run continues their augmentation, for example.

torch seeds each worker of a loader at its start; later the main process can't see the worker's generators. Here a
worker sends its random state with each batch, if the state has changed. The workers of a resumed run start with these
states, and the first batch comes from the worker whose turn it was.

This covers the global generators of torch, NumPy and Python, and generators that the data set owns. torchdata's loader
is treated in the same way if its data has no state of its own.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

# torch: how it seeds numpy in a worker.
# torch: what DataLoader._get_iterator makes where there are workers.
from .._compat.torch import _generate_state, _MultiProcessingDataLoaderIter
from ..checkpoint.rng import get_random_state, set_random_state
from .clone_loader import DatasetProxy, classes_of_torchdata, clone_loader, is_torchdata_loader, substitute_dataset
from .own_generators import OwnGenerators, States, set_own_states, set_state_here
from .shards import ShardedStream
from .stateful import has_position_state, is_stateful, tracks_own_position
from .stream_loader import OTHER_BATCHES, BeginsWithWorker, add_to_digest

__all__ = ["WithWorkers", "Workers", "end_workers", "has_workers", "track_draws"]

_TORCHDATAS = "torchdata.stateful_dataloader.stateful_dataloader"
_ENDED_EARLY = """\
The checkpoint is saved after the run. Its persistent workers have ended with unread batches, and the random numbers
drawn for them are not known, so a resumed run may augment its samples differently. Save in a hook, or by a callback
such as Snapshot."""


def has_workers(loader: Any) -> bool:
    """Whether `loader` has workers whose random states its own `state_dict` does not contain."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0 or tracks_own_position(loader):
        return False
    # torch: DataLoader._get_iterator
    torchdata_classes = classes_of_torchdata("stateful_dataloader", "StatefulDataLoader")
    supported = (*_PLAIN, *(cls._get_iterator for cls in torchdata_classes))
    return type(loader)._get_iterator in supported


def end_workers(loaders: Iterable[Any], kept: Iterable[Any] = ()) -> None:
    """Ends the workers of loaders at the end of a run, or when other loaders replace them; `kept` are still read.

    Lightning does so at the end of a run, for torch's loader; of torchdata's it drops the iterator alone. The garbage
    collector would end the workers later, at any moment, after their queues: it would wait for 5 s per worker.
    """
    still_read = set(map(id, kept))
    for loader in loaders:
        iterator = getattr(loader, "_iterator", None)
        if isinstance(iterator, _TakesStates) and id(loader) not in still_read:
            iterator._shutdown_workers()
            loader._iterator = None


class Workers:
    """Keeps the random states of a training loader's workers after each of the last batches.

    Args:
        epoch: returns the number of the current epoch.
        num_kept: returns the number of batches after which states are kept.
    """

    def __init__(self, epoch: Callable[[], int], num_kept: Callable[[], int]) -> None:
        self._epoch, self._num_kept = epoch, num_kept
        self._of_epoch, self._num_batches, self._next = -1, 0, 0
        self._layout: dict[str, Any] = {}
        self._states: dict[int, States] = {}
        self._after: dict[int, tuple[int, dict[int, States]]] = {}
        self._resumed: dict[str, Any] | None = None
        self._iterator: _TakesStates | None = None
        """The iterator whose workers stay after an epoch (`persistent_workers`)."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": None, "_num_kept": None, "_iterator": None}

    def resume(self, loader: DataLoader, state: dict[str, Any] | None) -> None:
        """Makes the next iterator of `loader` continue from a result of `state_after`, if it has the same workers."""
        if state is not None and {name: state[name] for name in _layout_of(loader)} == _layout_of(loader):
            self._resumed = state

    def iterator(self, loader: DataLoader) -> "_TakesStates":
        """Returns the iterator over `loader`, which replaces torch's or torchdata's own."""
        loader.check_worker_number_rationality()  # torch: as DataLoader._get_iterator does
        resumed, self._resumed = self._resumed, None
        if is_torchdata_loader(loader):
            # torchdata: StatefulDataLoader._get_iterator, which starts from the state that the user has loaded.
            loaded, loader.next_iter_state = loader.next_iter_state, None  # type: ignore[attr-defined]
            iterator: _TakesStates = _torchdatas_iterator()(loader, self, resumed, loaded)
        else:
            iterator = _Iterator(loader, self, resumed)
        self._iterator = iterator if loader.persistent_workers else None
        return iterator

    def take_over(self, loader: DataLoader) -> None:
        """Takes over persistent workers of an earlier run; called before `loader` is iterated."""
        persistent = loader._iterator  # torch: set for persistent workers only
        if self._resumed is not None:
            loader.__dict__["_iterator"] = None
        elif isinstance(persistent, _TakesStates) and persistent.kept is not self:
            self._states, self._iterator, persistent.kept = persistent.kept._states, persistent, self

    def recount(self, batches: int) -> None:
        """Corrects the number of batches that this run has read in the epoch."""
        self._num_batches = batches
        self._after.clear()

    def begin(self, layout: dict[str, Any], first: int, states: dict[int, States] | None) -> None:
        """Begins a pass over the loader.

        Args:
            layout: number and seeds of the workers.
            first: the worker of the first batch.
            states: the workers' states at the start; None for persistent workers, whose states are known.
        """
        if self._of_epoch != self._epoch():
            self._of_epoch, self._num_batches = self._epoch(), 0
            self._after.clear()
        self._layout, self._next = layout, first
        self._states = self._states if states is None else states
        self._keep()

    def note(self, worker: int, state: States | None) -> None:
        """Notes that a batch was read; `state` is the new state of its worker, None if unchanged."""
        if state is not None:
            self.set_state(worker, state)
        self._num_batches += 1
        self._next = (self._next + 1) % self._layout["num_workers"]
        self._keep()

    def set_state(self, worker: int, state: States) -> None:
        """Sets the current state of a worker."""
        self._states = {**self._states, worker: state}

    def _keep(self) -> None:
        self._after[self._num_batches] = self._next, self._states
        for oldest in list(self._after)[: -self._num_kept()]:
            del self._after[oldest]

    def state_after(self, epoch: int, batches: int) -> dict[str, Any] | None:
        """Returns the states of all workers as plain values; None if they start afresh, or are not known.

        Args:
            epoch: the current epoch, or the next one.
            batches: the number of batches read in the epoch by this run; one of the last ones.
        """
        if epoch == self._of_epoch and batches in self._after:
            following, states = self._after[batches]
        elif epoch > self._of_epoch >= 0 and self._iterator is not None:
            if self._iterator.has_ended_early:
                rank_zero_warn(_ENDED_EARLY)
            else:
                self._iterator.finish()
            following, states = 0, self._states
        else:
            return None
        plain = {worker: states[worker].plain() for worker in states}
        return {**self._layout, "next": following, "states": plain, "stay": epoch > self._of_epoch}


class WithWorkers(DataLoader):
    """A loader whose iterators also receive the random states of their workers."""

    workers: Workers

    def _get_iterator(self) -> Any:
        return self.workers.iterator(self)  # torch: DataLoader._get_iterator


_PLAIN = (DataLoader._get_iterator, WithWorkers._get_iterator)


def _layout_of(loader: DataLoader) -> dict[str, Any]:
    return {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}


_AnyIterator: Any = object
"""The type of torch's and torchdata's iterators, which have no common base class."""


class _SkipsFirst:
    """Makes the first iterator of a sampler empty: torch creates one more for new workers than for persistent ones.

    Args:
        sampler: the user's sampler or batch sampler, or its replacement.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._is_first = sampler, True

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        is_first, self._is_first = self._is_first, False
        return iter(()) if is_first else iter(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _TakesStates(BeginsWithWorker, _AnyIterator):
    """An iterator with workers that separates the states from the batches.

    Args:
        loader: the loader to iterate.
        kept: receives the states.
        resumed: the state that the workers resume from; None for torch's own seeds.
        more: further arguments of the base class's constructor.
    """

    _task_info: dict[int, Any]
    _tasks_outstanding: int

    def __init__(self, loader: DataLoader, kept: Workers, resumed: dict[str, Any] | None, *more: Any) -> None:
        self.kept, self._resumed = kept, resumed
        self._first = 0 if resumed is None else resumed["next"]
        inside = _InWorker(loader, resumed)
        replaced: dict[str, Any] = {"collate_fn": inside.collate, "worker_init_fn": inside.begin}
        if resumed is not None:
            replaced["generator"] = torch.Generator()  # torch draws a seed here, so it must not use a shared generator
        if resumed is not None and resumed.get("stay"):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            replaced[name] = _SkipsFirst(getattr(loader, name))
        super().__init__(clone_loader(loader, **replaced), *more)

    def _reset(self, loader: Any, first_iter: bool = False, **more: Any) -> None:
        resumed, states = self._resumed or {}, None
        if first_iter:
            states = {worker: States.of(state) for worker, state in resumed.get("states", {}).items()}
        else:
            self.finish()
        layout = {**_layout_of(loader), "base_seed": resumed.get("base_seed", self._base_seed)}
        self.kept.begin(layout, self._first, states)
        super()._reset(loader, first_iter, **more)

    @property
    def has_ended_early(self) -> bool:
        """Whether the workers have ended with the run before all requested batches were read."""
        return self._shutdown and self._tasks_outstanding > 0  # torch: set by _shutdown_workers

    def finish(self) -> None:
        """Waits for requested batches that will not be read, since the workers have drawn random numbers for them."""
        # torch: `_task_info` has the tasks and early results; `_tasks_outstanding` counts the missing ones.
        ahead = {number: rest[0] for number, (_, *rest) in self._task_info.items() if rest}
        ahead.update(self._get_data() for _ in range(self._tasks_outstanding))
        self._task_info, self._tasks_outstanding = {}, 0
        for _, fetched in sorted(ahead.items(), key=lambda item: item[0]):
            data = self._data_of(fetched)
            if isinstance(data, tuple) and data[2] is not None:  # an exception of a worker is no tuple
                self.kept.set_state(data[1], data[2])

    def _data_of(self, fetched: Any) -> Any:
        return fetched

    def _next_data(self) -> Any:
        batch, worker, state = super()._next_data()
        self.kept.note(worker, state)
        return batch


class _Iterator(_TakesStates, _MultiProcessingDataLoaderIter):
    """Extends torch's iterator."""


@functools.cache
def _torchdatas_iterator() -> Any:
    """Returns the class that extends torchdata's iterator; torchdata is imported already if the user has its loader."""
    # torchdata: the iterator of a loader with workers.
    base: Any = sys.modules[_TORCHDATAS]._StatefulMultiProcessingDataLoaderIter

    class StatefulIterator(_TakesStates, base):
        def _data_of(self, fetched: Any) -> Any:
            return fetched[0]  # torchdata: a tuple with the worker and a state of its data set

    return StatefulIterator


class _InWorker:
    """Wraps the user's collate_fn and worker_init_fn in the workers."""

    def __init__(self, loader: DataLoader, resumed: dict[str, Any] | None) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._base_seed = None if resumed is None else resumed["base_seed"]
        self._states = {} if resumed is None else resumed["states"]
        self._worker = -1
        self._own = OwnGenerators(None)
        self._latest: States | None = None

    def begin(self, worker: int) -> None:
        """Replaces `worker_init_fn`: restores the worker's state, and calls the user's function."""
        if self._base_seed is not None:
            # torch: as _worker_loop does right before it calls this function.
            seed = self._base_seed + worker
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(_generate_state(self._base_seed, worker))
            object.__setattr__(get_worker_info(), "seed", seed)  # the object is frozen
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            set_random_state({**get_random_state(), **self._states[worker]})
            set_own_states(_dataset(), self._states[worker].get("own", {}))
        self._own = OwnGenerators(_dataset())
        self._worker, self._latest = worker, self._own.here()

    def collate(self, samples: Any) -> tuple[Any, int, States | None]:
        """Replaces `collate_fn`: returns the batch, its worker, and the state after it if that has changed."""
        batch, state = self._collate(samples), self._own.here()
        if state == self._latest:
            return batch, self._worker, None
        self._latest = state
        return batch, self._worker, state


def _dataset() -> Any:
    """Returns the data set of this worker."""
    info = get_worker_info()
    return None if info is None else info.dataset


# Saves the random states of streams in a loader's workers, so that a resumed run draws the same numbers.
#
# A stream without a state is read again up to its position, with collation and with the generators as they were when
# the pass began, so that it draws the same order; a checksum of its samples tells if it has not. After that the
# generators get their states at that position.

_MARK = "polyphase_draws"
"""The key that identifies a state as one of a `_DrawingStream`."""


class _DrawingStream(DatasetProxy):
    """Reads a stream in a worker; its state includes those of the generators.

    Args:
        dataset: the user's.
        collate: makes a batch of a list of samples, or collates one sample if `batch_size` is None.
        batch_size: samples of a batch; None if samples are not batched.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batch_size: int | None) -> None:
        super().__init__(dataset)
        self._own = OwnGenerators(dataset)
        self._collate, self._batch_size = collate, batch_size
        self._first: States | None = None
        """The states of the generators when the worker began."""
        self._start: States | None = None
        self._count, self._has_ended = 0, False
        self._digest = None if is_stateful(dataset) else 0
        """The checksum of the samples of the pass, for a stream without a state."""
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if self._first is None:
            self._first = self._own.here()
        self._has_ended = False
        if loaded is None:
            self._start, self._count = self._own.here(), 0
            self._digest = None if self._digest is None else 0
            return self._counted(iter(self.dataset))
        self._count = loaded["count"]
        self._start = States.of(loaded["start"]) if loaded["start"] else self._first
        if loaded["ended"] and not is_stateful(self.dataset):
            samples: Iterator[Any] = iter(())
            self._digest = loaded["digest"]
        elif is_stateful(self.dataset):
            samples = self._at_state(loaded["state"])
        else:
            set_state_here(self.dataset, self._start.plain())
            samples = self._read_again(loaded["digest"])
        set_state_here(self.dataset, loaded["now"] or self._first.plain())
        return self._counted(samples)

    def _at_state(self, state: Any) -> Iterator[Any]:
        self.dataset.load_state_dict(state)
        samples = iter(self.dataset)
        if samples is self.dataset:  # torchdata: it loads the state of such a stream after it has made the iterator
            self.dataset.load_state_dict(state)
        return samples

    def _read_again(self, digest: int) -> Iterator[Any]:
        """Reads the samples before the position, as the saved run has read them.

        Args:
            digest: the checksum of these samples.

        Raises:
            ValueError: the stream has fewer, or yields other ones.
        """
        samples, left, self._digest = iter(self.dataset), self._count, 0
        while left > 0:
            taken = list(islice(samples, min(left, self._batch_size or 1)))
            if not taken:
                raise ValueError(
                    f"{type(self.dataset).__name__} has fewer than the {self._count} samples that a worker had read of"
                    " it before the checkpoint: use the same data, or load only the weights to begin an epoch."
                )
            for sample in taken:
                self._digest = add_to_digest(self._digest, sample)
            self._collate(taken[0] if self._batch_size is None else taken)  # which may draw
            left -= len(taken)
        if digest != self._digest:
            raise ValueError(OTHER_BATCHES.format(name=type(self.dataset).__name__))
        return samples

    def _counted(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._count += 1
            if self._digest is not None:
                self._digest = add_to_digest(self._digest, sample)
            yield sample
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this worker, with the states of the generators if something was drawn."""
        now = self._own.here()
        has_drawn = now != self._first
        return {
            _MARK: True,
            "state": self.dataset.state_dict() if is_stateful(self.dataset) else None,
            "count": self._count,
            "ended": self._has_ended,
            "digest": self._digest,
            "start": self._start.plain() if has_drawn and self._start is not None else None,
            "now": now.plain() if has_drawn else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iterator continue at a position."""
        is_ours = isinstance(state, dict) and _MARK in state
        self._loaded = state if is_ours else {"state": state, "count": 0, "ended": False, "start": None, "now": None}


class _DrawingLoader(DataLoader):
    """A stateful loader whose workers read a `_DrawingStream` instead of its data set."""

    def __iter__(self) -> Any:
        with substitute_dataset(self, self._stream()):
            return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Returns torchdata's state; if there is no iterator, torchdata creates one, which reads a `_DrawingStream`."""
        with substitute_dataset(self, self._stream()):
            return super().state_dict()  # type: ignore[misc]

    def _stream(self) -> _DrawingStream:
        return _DrawingStream(self.dataset, self.collate_fn, self.batch_size)


def track_draws(loader: DataLoader) -> DataLoader:
    """Returns a copy of a stateful loader whose state includes its workers' generators; or the loader itself.

    A copy is not needed if workers are started in each epoch and the stream has no state: then it is read again, with
    collation.
    """
    dataset: Any = loader.dataset
    has_workers = loader.num_workers > 0 and isinstance(dataset, IterableDataset)
    if not has_workers or isinstance(dataset, (IterDataPipe, ShardedStream)) or not has_position_state(loader):
        return loader
    if not is_stateful(dataset) and not loader.persistent_workers:
        return loader
    return clone_loader(loader, _DrawingLoader, keeps_draws=True)
