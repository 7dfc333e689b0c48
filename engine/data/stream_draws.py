"""Saves the random states of streams in a loader's workers, so that a resumed run draws the same numbers.

A stream without a state is read again up to its position, with collation and with the generators as they were when the
pass began, so that it draws the same order; a checksum of its samples tells if it has not. After that the generators
get their states at that position.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from .clone_loader import DatasetProxy, clone_loader, substitute_dataset
from .drawing import is_same_state
from .own_generators import OwnGenerators, set_state_here
from .shards import ShardedStream
from .stateful import has_position_state, is_stateful
from .stream_loader import OTHER_BATCHES, add_to_digest

__all__ = ["track_draws"]

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
        self._first: Any = None
        """The states of the generators when the worker began."""
        self._start: Any = None
        self._count, self._has_ended = 0, False
        self._digest = None if is_stateful(dataset) else 0
        """The checksum of the samples of the pass, for a stream without a state."""
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if self._first is None:
            self._first = self._own.state_here()
        self._has_ended = False
        if loaded is None:
            self._start, self._count = self._own.state_here(), 0
            self._digest = None if self._digest is None else 0
            return self._counted(iter(self.dataset))
        self._count, self._start = loaded["count"], loaded["start"] or self._first
        if loaded["ended"] and not is_stateful(self.dataset):
            samples: Iterator[Any] = iter(())
            self._digest = loaded["digest"]
        elif is_stateful(self.dataset):
            samples = self._at_state(loaded["state"])
        else:
            set_state_here(self.dataset, self._start)
            samples = self._read_again(loaded["digest"])
        set_state_here(self.dataset, loaded["now"] or self._first)
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
        now = self._own.state_here()
        has_drawn = not is_same_state(now, self._first)
        return {
            _MARK: True,
            "state": self.dataset.state_dict() if is_stateful(self.dataset) else None,
            "count": self._count,
            "ended": self._has_ended,
            "digest": self._digest,
            "start": self._start if has_drawn else None,
            "now": now if has_drawn else None,
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
