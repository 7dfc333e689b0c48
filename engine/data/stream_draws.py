"""Streams that draw random numbers in a loader's workers: a resumed run draws the same ones again.

A stream that has no state is read again up to its place, by the generators as they were when the pass began, so that an
order that is drawn on the way is the same one. After that the generators are set to where they were at that place.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torchdata.stateful_dataloader import StatefulDataLoader

from .copied import copied
from .drawing import is_same_state
from .own_generators import OwnGenerators, set_state_here
from .shards import Shards
from .stand_in import StandIn, reading
from .stateful import is_stateful

__all__ = ["DrawingLoader", "DrawingStream", "drawing"]

_MARK = "polyphase_draws"
"""Key that marks the state of a `DrawingStream`."""


class DrawingStream(StandIn):
    """A stream as workers read it, whose state has those of the generators."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._own = OwnGenerators(dataset)
        self._first: Any = None
        """The generators when the worker began."""
        self._start: Any = None
        self._count, self._has_ended = 0, False
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if self._first is None:
            self._first = self._own.state_here()
        self._has_ended = False
        if loaded is None:
            self._start, self._count = self._own.state_here(), 0
            return self._counted(iter(self.dataset))
        self._count, self._start = loaded["count"], loaded["start"] or self._first
        if loaded["ended"] and not is_stateful(self.dataset):
            samples: Iterator[Any] = iter(())
        elif is_stateful(self.dataset):
            samples = self._at_state(loaded["state"])
        else:
            set_state_here(self.dataset, self._start)
            samples = iter(self.dataset)
            _skip(samples, self._count, self.dataset)
        set_state_here(self.dataset, loaded["now"] or self._first)
        return self._counted(samples)

    def _at_state(self, state: Any) -> Iterator[Any]:
        self.dataset.load_state_dict(state)
        samples = iter(self.dataset)
        if samples is self.dataset:  # torchdata: loads these when they are iterated
            self.dataset.load_state_dict(state)
        return samples

    def _counted(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._count += 1
            yield sample
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """The place of this worker; without the generators if nothing was drawn."""
        now = self._own.state_here()
        has_drawn = not is_same_state(now, self._first)
        return {
            _MARK: True,
            "state": self.dataset.state_dict() if is_stateful(self.dataset) else None,
            "count": self._count,
            "ended": self._has_ended,
            "start": self._start if has_drawn else None,
            "now": now if has_drawn else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iterator go on at a place."""
        is_ours = isinstance(state, dict) and _MARK in state
        self._loaded = state if is_ours else {"state": state, "count": 0, "ended": False, "start": None, "now": None}


def _skip(samples: Iterator[Any], count: int, dataset: Any) -> None:
    if sum(1 for _ in islice(samples, count)) < count:
        raise ValueError(
            f"{type(dataset).__name__} has fewer than the {count} samples that a worker had read of it before the"
            " checkpoint: use the same data, or load the weights alone to begin an epoch."
        )


class DrawingLoader(DataLoader):
    """A `StatefulDataLoader` whose workers read a `DrawingStream` in place of its data set, which stays the user's."""

    def __iter__(self) -> Any:
        with reading(self, DrawingStream(self.dataset)):
            return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Returns torchdata's state, for which that makes an iterator where there is none."""
        with reading(self, DrawingStream(self.dataset)):
            return super().state_dict()  # type: ignore[misc]


def drawing(loader: DataLoader) -> DataLoader:
    """A copy of a stateful loader whose workers' draws are in its state; itself if torchdata sees to them.

    It does where workers begin anew in each epoch and the stream has no state: it is then read again, collation too.
    """
    dataset: Any = loader.dataset
    has_workers = loader.num_workers > 0 and isinstance(dataset, IterableDataset)
    if not has_workers or isinstance(dataset, (IterDataPipe, Shards)) or not isinstance(loader, StatefulDataLoader):
        return loader
    if not is_stateful(dataset) and not loader.persistent_workers:
        return loader
    return copied(loader, DrawingLoader, keeps_draws=True)
