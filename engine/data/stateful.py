"""Loaders that keep their own place: torchdata's `StatefulDataLoader`, for data that has no order to be dealt."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .copied import copied

__all__ = ["Remembering", "as_stateful", "is_stateful", "keeps_place", "remembering"]

_ARGUMENTS = (
    "dataset",
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def is_stateful(loader: Any) -> bool:
    """Whether `loader` says where it is, and can go on there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def keeps_place(loader: Any) -> bool:
    """Whether the place is in a state of the loader's own, and not in the order of samples that it follows.

    That order alone says where a `StatefulDataLoader` is whose data set has a length, and no state.
    """
    if isinstance(loader, StatefulDataLoader):
        return isinstance(loader.dataset, IterableDataset) or is_stateful(loader.dataset)
    return is_stateful(loader)


def as_stateful(loader: DataLoader) -> DataLoader:
    """A `StatefulDataLoader` in place of a plain loader over an `IterableDataset`; any other loader as it is."""
    if type(loader) is not DataLoader:
        return loader
    with warnings.catch_warnings():
        # Of torchdata's to torch 2.13; nothing a user could change.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(**{name: getattr(loader, name) for name in _ARGUMENTS})


class Remembering(DataLoader):
    """A stateful loader that remembers its state after each of its last batches.

    The state to save is seldom the present one: Lightning fetches a batch ahead of those that are trained on where it
    can't know which one is the last, and the batches of an unfinished accumulation are done again.
    """

    num_kept: Callable[[], int]
    """How many states are asked for at most."""
    _states: dict[int, dict[str, Any] | None]
    _present: dict[str, Any] | None = None

    def begin(self, epoch: int, batches: int = 0) -> None:
        """Called before the first batch of an epoch, or of what is left of it after `batches` batches."""
        self._epoch, self._batches = epoch, batches
        self._states = {batches: self._present}

    def state_after(self, epoch: int, batches: int) -> dict[str, Any] | None:
        """State after a number of batches of an epoch; None is that of a new loader.

        Args:
            epoch: the present one, or the one after it.
            batches: in the present epoch, one of the last.
        """
        if epoch != self._epoch:
            return self._present
        return self._states.get(batches, next(iter(self._states.values())))

    @property
    def evolves(self) -> bool:
        """Whether an epoch may depend on those before: not if it is up to the iterator of a stream without a state."""
        return not isinstance(self, StatefulDataLoader) or is_stateful(self.dataset)

    def resume(self, epoch: int, batches: int, state: dict[str, Any] | None) -> None:
        """Goes on where a loader was whose `state_after` these batches was `state`."""
        self._present = state
        self.begin(epoch, batches)
        if state is None or (batches == 0 and not self.evolves):
            return
        self.load_state_dict(copy.deepcopy(state["state"]))  # type: ignore[attr-defined]
        if batches == 0 and not state["ended"]:
            super().__iter__()  # what was left of the epoch before, of which no more was asked for

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _Noted(self, super().__iter__())

    def note(self, *, ended: bool) -> None:
        """Remembers the present state: one batch on, or at the end."""
        self._present = {"state": copy.deepcopy(self.state_dict()), "ended": ended}  # type: ignore[attr-defined]
        if not ended:
            self._keep()

    def repeat(self) -> None:
        """Counts a batch beyond the last one."""
        self._keep()

    def _keep(self) -> None:
        self._batches += 1
        self._states[self._batches] = self._present
        for oldest in list(self._states)[: -self.num_kept()]:
            del self._states[oldest]


class _Noted:
    """An iterator of a loader that is told of each batch."""

    def __init__(self, loader: Remembering, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._loader.note(ended=True)
            raise
        self._loader.note(ended=False)
        return batch


def remembering(loader: DataLoader, epoch: int, num_kept: Callable[[], int]) -> Remembering:
    """A copy of a stateful loader, of a subclass of its class."""
    found = copied(loader, Remembering, num_kept=num_kept)
    found.begin(epoch)
    return found
