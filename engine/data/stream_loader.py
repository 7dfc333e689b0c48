"""A loader of streams with `state_dict`: torch's own iterators, whose workers send their position with each batch.

The states have the format of torchdata's `StatefulDataLoader`, so a checkpoint can be resumed with either loader. There
are three differences. A worker that had finished its part is not read again after a resumption, even if its data set
would restart. `state_dict` does not create an iterator. And the state of a stream without a state has a checksum of the
batches of the pass: if the stream is read again and yields other ones, its iterator says so by `is_another`.

Before its first batch and after its last batch a worker yields its position alone. So the loader knows the positions
of all workers at each batch, and the position of a persistent worker for the next epoch.
"""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

# torch: the iterators of DataLoader._get_iterator, and the class that reads the batches of a data set.
from .._compat.torch import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from .clone_loader import clone_loader
from .exhausted import fetch_from_stream

__all__ = [
    "OTHER_BATCHES",
    "BeginsWithWorker",
    "StreamLoader",
    "add_to_digest",
    "can_be_read",
    "is_stateful",
]


def can_be_read(loader: DataLoader) -> bool:
    """Whether a `StreamLoader` can replace `loader` and track its position.

    Batches that workers deliver in any order have no position. torch shares a DataPipe among workers, and for that it
    must be the loader's own data set.
    """
    return loader.num_workers == 0 or (loader.in_order and not isinstance(loader.dataset, IterDataPipe))


class StreamLoader(DataLoader):
    """A DataLoader of an `IterableDataset` with `state_dict` and `load_state_dict`."""

    _iterator: Any
    _loaded: dict[str, Any] | None = None

    def _get_iterator(self) -> Any:
        loaded, self._loaded = self._loaded, None
        if self.num_workers == 0:
            return _HereIterator(self, loaded)
        self.check_worker_number_rationality()  # torch: as DataLoader._get_iterator does
        return _WorkersIterator(self, loaded)

    def __iter__(self) -> Any:
        if self._iterator is not None and self.persistent_workers:
            self._iterator._reset(self)
        else:
            self._iterator = self._get_iterator()
        if self._iterator.has_ended:  # in the state that was loaded
            if self.persistent_workers:
                self._iterator._reset(self)
            else:
                self._iterator = self._get_iterator()
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the latest batch, which later ones don't change; empty before anything is read."""
        if self._iterator is None:
            return self._loaded or {}
        return self._iterator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iterator continue at a position; an empty state means the start."""
        self._iterator = None
        self._loaded = state or None


class _HereIterator(_SingleProcessDataLoaderIter):
    """Iterates in this process, without workers."""

    is_another: bool
    """Whether a stream without a state was read again up to its position, and has yielded other batches than before."""
    _digest: int | None
    """The checksum of the batches of the pass, for a stream without a state."""

    def __init__(self, loader: DataLoader, loaded: dict[str, Any] | None) -> None:
        if loaded is not None:
            _load(loader.dataset, loaded)
        super().__init__(loader)
        self.has_ended, self.is_another = False, False
        self._of_stream = _states_of(self._dataset_fetcher)
        self._digest = None if any(self._of_stream) else 0
        if loaded is not None:
            self._restore(loaded)

    def _restore(self, loaded: dict[str, Any]) -> None:
        if self._digest is None:
            _continue(self._dataset_fetcher, loaded)
        else:
            _read_again(self, loaded["_num_yielded"], self._dataset)
            self.is_another = loaded.get("_digest", self._digest) != self._digest
        self._num_yielded, self.has_ended = loaded["_num_yielded"], loaded["_iterator_finished"]

    def __next__(self) -> Any:
        try:
            batch = super().__next__()
        except StopIteration:
            self.has_ended = True
            raise
        if self._digest is not None:
            self._digest = add_to_digest(self._digest, batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        digest = {} if self._digest is None else {"_digest": self._digest}
        return {
            **_place(self._of_stream, self._dataset_fetcher),
            **digest,
            **_OF_SAMPLER,
            "_sampler_iter_yielded": self._num_yielded,
            "_num_yielded": self._num_yielded,
            "_iterator_finished": self.has_ended,
        }


class BeginsWithWorker:
    """Mixin for iterators with workers: the first pass starts with the worker `_first`, where another run stopped."""

    _first: int

    # torch: the cycle of worker turns; torch restarts it at the first worker in each pass.
    @property
    def _worker_queue_idx_cycle(self) -> Any:
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: Any) -> None:
        self._turns, self._first = islice(turns, self._first, None), 0


class _WorkersIterator(BeginsWithWorker, _MultiProcessingDataLoaderIter):
    """Iterates with workers, and separates their positions from the batches."""

    is_another = False
    """As in `_HereIterator`."""

    def __init__(self, loader: DataLoader, loaded: dict[str, Any] | None) -> None:
        snapshot = {} if loaded is None else loaded["_snapshot"]
        workers = snapshot.get("_worker_snapshots", {})
        # Without states the batches of the pass are read again, by workers with the same seeds.
        is_again = not any(_has_state(position) for position in workers.values())
        self._given_seed = snapshot.get("_main_snapshot", {}).get("_base_seed")
        self._first = 0 if is_again else snapshot["_last_yielded_worker_id"] + 1
        self._places: dict[str, Any] = {}
        batches = _Batches(loader, {} if is_again else workers)
        # A batch of the stream is a sample of `batches`.
        how: dict[str, Any] = {
            "batch_size": None,
            "batch_sampler": None,
            "collate_fn": _as_it_is,
            "worker_init_fn": batches.begin,
        }
        super().__init__(clone_loader(loader, dataset=batches, **how))
        self._given_seed = None
        if loaded is not None:
            if is_again:
                _read_again(self, snapshot["_snapshot_step"], loader.dataset)
                self.is_another = loaded.get("_digest", self._digest) != self._digest
            self._restore(loaded)

    def _restore(self, loaded: dict[str, Any]) -> None:
        snapshot = loaded["_snapshot"]
        self._latest, self._num_yielded = snapshot["_last_yielded_worker_id"], snapshot["_snapshot_step"]
        for _ in range(loaded["_steps_since_snapshot"]):  # torchdata: with snapshot_every_n_steps > 1
            next(self)
        self.has_ended = loaded["_iterator_finished"]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._latest, self.has_ended, self._digest = self._num_workers - 1, False, 0
        super()._reset(loader, first_iter)
        for _ in range(self._num_workers):  # each worker's first item is its initial position
            self._places.update([super()._next_data()[1].content])

    # torch: the seed of the workers; each iterator draws a new one.
    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed = drawn if self._given_seed is None else self._given_seed

    def _next_data(self) -> Any:
        while True:
            try:
                batch, position = super()._next_data()
            except StopIteration:
                self.has_ended = True
                raise
            self._places.update([position.content])
            if position.has_batch:
                self._latest = position.worker
                if not any(map(_has_state, self._places.values())):
                    self._digest = add_to_digest(self._digest, batch)
                return batch

    def state_dict(self) -> dict[str, Any]:
        main = {**_OF_SAMPLER, "_num_workers": self._num_workers, "_sampler_iter_yielded": self._num_yielded}
        digest = {} if any(map(_has_state, self._places.values())) else {"_digest": self._digest}
        return {
            **digest,
            "_snapshot": {
                "_snapshot_step": self._num_yielded,
                "_last_yielded_worker_id": self._latest,
                "_main_snapshot": {**main, "_base_seed": self._base_seed},
                "_worker_snapshots": dict(self._places),
            },
            "_steps_since_snapshot": 0,
            "_iterator_finished": self.has_ended,
        }


class _Batches(IterableDataset[Any]):
    """Reads a stream in a worker, in batches.

    Args:
        loader: the loader whose data set and settings are used.
        places: the positions at which the workers continue.
    """

    def __init__(self, loader: DataLoader, places: dict[str, Any]) -> None:
        self.dataset: Any = loader.dataset
        self._how = loader._auto_collation, loader.collate_fn, loader.drop_last
        self._indices = [None] * (loader.batch_size or 1)
        self._users_init, self._places = loader.worker_init_fn, places

    def begin(self, worker: int) -> None:
        """Replaces `worker_init_fn`: shows the user's data set in the worker's info, and calls the user's function."""
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # the object is frozen
        if self._users_init is not None:
            self._users_init(worker)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        position = self._places.pop(_key(worker.id), None)
        if position is not None:
            _load(self.dataset, position)
        fetcher: Any = _DatasetKind.create_fetcher(_DatasetKind.Iterable, self.dataset, *self._how)
        if position is not None:
            _continue(fetcher, position)
        return self._read(fetcher, worker.id)

    def _read(self, fetcher: Any, worker: int) -> Iterator[tuple[Any, "_Place"]]:
        of_stream = _states_of(fetcher)
        yield None, _Place(worker, of_stream, fetcher, has_batch=False)
        while True:
            try:
                batch = fetch_from_stream(fetcher, self._indices)
            except StopIteration:
                break
            yield batch, _Place(worker, of_stream, fetcher, has_batch=True)
        fetcher.ended = True
        yield None, _Place(worker, of_stream, fetcher, has_batch=False)


class _Place:
    """The position of a worker. Not a tuple, which pin_memory would traverse."""

    def __init__(self, worker: int, of_stream: "_OfStream", fetcher: Any, *, has_batch: bool) -> None:
        self.worker, self.has_batch = worker, has_batch
        self.content = _key(worker), {"worker_id": worker, **_place(of_stream, fetcher)}


_OF_SAMPLER: dict[str, Any] = {
    "_sampler_iter_state": None,
    "_index_sampler_state": None,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
}
"""Other entries of a torchdata state; they have no meaning for a stream."""


def _key(worker: int) -> str:
    return f"worker_{worker}"


def _as_it_is(batch: Any) -> Any:
    return batch


def is_stateful(candidate: Any) -> bool:
    """Whether a loader, a data set or its iterator has `state_dict` and `load_state_dict`."""
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))


def _read_again(batches: Iterator[Any], count: int, dataset: Any) -> None:
    """Reads the first batches of a stream that has no state."""
    if (num_batches := sum(1 for _ in islice(batches, count))) < count:
        name = type(getattr(dataset, "dataset", dataset)).__name__  # of the user's data set inside a proxy
        raise ValueError(
            f"{name} has {num_batches} batches, but {count} were read before the checkpoint: use the same data, or load"
            " only the weights to begin an epoch."
        )


_OfStream = tuple[Callable[[], Any] | None, Callable[[], Any] | None]


def _states_of(fetcher: Any) -> _OfStream:
    """Returns `state_dict` of a stream and of its iterator, None where there is none; they may be the same object."""
    dataset, samples = fetcher.dataset, fetcher.dataset_iter
    is_apart = samples is not dataset and is_stateful(dataset)
    return dataset.state_dict if is_apart else None, samples.state_dict if is_stateful(samples) else None


def _place(of_stream: _OfStream, fetcher: Any) -> dict[str, Any]:
    """Returns the position of a stream, with copies of the states."""
    of_dataset, of_samples = of_stream
    state = None if of_samples is None else _copied(of_samples())
    return {
        "dataset_state": None if of_dataset is None else _copied(of_dataset()),
        "fetcher_state": {"dataset_iter_state": state, "fetcher_ended": fetcher.ended},
    }


def _copied(state: Any) -> Any:
    """Returns a copy of a state; of the usual one, some numbers by name, without a call for each of them."""
    is_flat = type(state) is dict and _VALUES.issuperset(map(type, state.values()))
    return dict(state) if is_flat else copy.deepcopy(state)


_VALUES = frozenset({bool, int, float, str, bytes, type(None)})


def _has_state(position: dict[str, Any]) -> bool:
    return position["dataset_state"] is not None or position["fetcher_state"]["dataset_iter_state"] is not None


def _load(dataset: Any, position: dict[str, Any]) -> None:
    """Loads the state of a stream before it is iterated."""
    if position["dataset_state"] is not None and is_stateful(dataset):
        dataset.load_state_dict(position["dataset_state"])


def _continue(fetcher: Any, position: dict[str, Any]) -> None:
    """Loads the state of a stream's iterator."""
    if position["fetcher_state"]["dataset_iter_state"] is not None and is_stateful(fetcher.dataset_iter):
        fetcher.dataset_iter.load_state_dict(position["fetcher_state"]["dataset_iter_state"])
    fetcher.ended = position["fetcher_state"]["fetcher_ended"]


# --- a checksum of batches. It shows whether a stream yields the same batches when it is read again
# A stream without a state is read again up to its position. Checkpoints may lack the generator that draws its order,
# for example one that is seeded by the clock. Then the stream yields other samples, and the run would skip some
# samples.


OTHER_BATCHES = """\
{name} has no `state_dict`, and was read again up to its place; but it has yielded other batches than in the run that \
saved the checkpoint: its order, or its augmentation, depends on what no checkpoint has, such as a generator that is \
seeded by the clock (webdataset's `shuffle` without `seed`, and `shardshuffle` without `detshuffle=True`) or by the \
system's entropy. Resume at the end of an epoch, or load only the weights. For the next run, seed these generators; \
if only the augmentation draws so, have it draw from the global generators of torch, NumPy or Python, which \
checkpoints have, or augment in the module; or give the data set `state_dict` and `load_state_dict`, with which it is \
not read again."""
"""The error about a stream of the class `name`."""

_MOST = 64
"""Number of elements of a tensor, array or list in the checksum, at equal distances: a whole batch of images would take
too long."""


def add_to_digest(digest: int, batch: Any) -> int:
    """Returns the checksum of the batches up to `batch`, given that of the batches before it.

    It depends on a batch's types, sizes and contents; of unknown objects, on their type alone.
    """
    parts: list[bytes] = []
    waiting = [batch]
    while waiting:  # one function for all parts, since it is called for each batch
        value = waiting.pop()
        if type(value) is _Key:
            parts.append(value)
            continue
        parts.append(type(value).__name__.encode())
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value.reshape(-1)[:: max(1, value.size // _MOST)].view(np.uint8).copy())
        if isinstance(value, Tensor):
            parts.append(str((value.dtype, tuple(value.shape))).encode())
            if value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized:
                flat = value.detach().resolve_conj().resolve_neg().reshape(-1)[:: max(1, value.numel() // _MOST)]
                parts.append(flat.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (str, bytes)):
            parts.append(str(len(value)).encode())
            parts.append(value[:1024].encode(errors="replace") if isinstance(value, str) else value[:1024])
        elif isinstance(value, (bool, int, float, complex, np.generic)):
            parts.append(str(value).encode())
        elif isinstance(value, (list, tuple)):
            parts.append(str(len(value)).encode())
            waiting += value[:_MOST][::-1]
        elif isinstance(value, Mapping):
            parts.append(str(len(value)).encode())
            for key, inner in [*islice(value.items(), _MOST)][::-1]:
                waiting += inner, _Key(str(key).encode())
    return zlib.crc32(b"".join(parts), digest)


class _Key(bytes):
    """A key of a mapping within a batch."""
