"""A loader of the user's own in one process: read as it is, and watched, so that a checkpoint can say where it is."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from .drawing import Passes, Record, is_same_state, state_before, state_of
from .workers import Workers, has_workers

__all__ = ["Watched", "WatchedLoaders"]


class _Seen(Record):
    """One pass, of which the items are noted while they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = array("q")
        """Position in the order after each batch."""


class Watched:
    """Iterates a loader and notes its order; the loader stays as it is: sampler, batch sampler, workers.

    Args:
        loader: the user's.
        sampler: what in it says which samples are trained on together.
        epoch: number of the present epoch.
        num_kept: after how many batches it is asked for the states of workers, at most.
    """

    def __init__(self, loader: DataLoader, sampler: Any, epoch: Callable[[], int], num_kept: Callable[[], int]) -> None:
        self.loader = loader
        self.sampler = sampler
        self.workers = Workers(epoch, num_kept) if has_workers(loader) else None
        self.passes = Passes()
        self._epoch = epoch
        self._noted: _Noted | None = None
        self._iterator: _NotedIterator | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": None, "_noted": None, "_iterator": None}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader's iterator keeps the sampler that it finds when it is made: only then there is another one.
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        users = self.loader.__dict__.get(name)
        if users is None:
            return iter(self.loader)
        if self._noted is None or self._noted.users is not users:
            self._noted = _Noted(users, self)
        self.loader.__dict__[name] = self._noted
        if self.workers is not None:
            self.workers.take_over(self.loader)
            self.loader.__dict__["_get_iterator"] = lambda: self.workers.iterator(self.loader)  # torch: makes one
        try:
            return iter(self.loader)
        finally:
            self.loader.__dict__[name] = users
            self.loader.__dict__.pop("_get_iterator", None)

    def begin_again(self) -> None:
        """Called before a second iterator is made for an epoch of which nothing was trained on."""
        if self._iterator is None or not self._iterator.is_unread:
            self.passes.begin_again(self._epoch())

    def begin(self, users: Any) -> "_NotedIterator":
        """A pass over the user's sampler or batch sampler."""
        seen = _Seen()
        latest = self._iterator
        # torch: an iterator with workers asks its sampler for two iterators, and reads the second one only.
        is_unread = latest is not None and latest.is_unread and latest.seen is self.passes.latest
        self.passes.begin(self._epoch(), seen, replaces_latest=is_unread)
        takes_batches = self.loader.batch_sampler is not None and self.sampler is not users
        self._iterator = _NotedIterator(users, self.sampler, seen, takes_batches)
        return self._iterator

    def size_of_batch(self, index: int) -> int | None:
        """Samples of a batch of the epoch's first pass; None if there is none, or it can't be seen."""
        seen = self.passes.of(self._epoch(), 0)
        if seen is None or self._iterator is None or self._iterator.seen is not seen:
            return None
        while len(seen.ends) <= index:
            if not self._iterator.look_ahead():
                return None
        if self.sampler is self.loader.batch_sampler:
            return len(seen.order[index])
        return seen.ends[index] - (seen.ends[index - 1] if index else 0)

    def state(self, epoch: int, number: int) -> dict[str, Any]:
        """Returns the same as `GlobalOrder.state`."""
        seen = self.passes.of(epoch, number)
        before = None if seen is None else seen.before
        return {
            "before": before,
            "sampler": None if before is not None else state_of(self.sampler),
            "whole": False,
            "num_passes": self.passes.num_until(epoch, number),
        }


class _Noted:
    """A sampler or batch sampler of the user's whose items are noted; else it is as theirs."""

    def __init__(self, users: Any, watched: Watched) -> None:
        self.users = users
        self._watched = watched

    def __len__(self) -> int:
        return len(self.users)

    def __iter__(self) -> "_NotedIterator":
        return self._watched.begin(self.users)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.users, name)


class _NotedIterator:
    def __init__(self, users: Any, sampler: Any, seen: _Seen, takes_batches: bool) -> None:
        self.seen = seen
        self._sampler = sampler
        self._takes_batches = takes_batches
        self._ahead: deque[Any] = deque()
        before = state_before(sampler)
        self._items = iter(users)
        self.is_unread = True
        """Whether nothing was asked for yet."""
        # Some samplers draw here, and most of them when they are asked for the first item.
        self.seen.before = None if is_same_state(before, state_before(sampler)) else before

    def __iter__(self) -> "_NotedIterator":
        return self

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._read()

    def look_ahead(self) -> bool:
        """Reads one more item than was asked for; whether there is one."""
        try:
            self._ahead.append(self._read())
        except StopIteration:
            return False
        return True

    def _read(self) -> Any:
        if self.seen.before is None:
            self.seen.before = state_before(self._sampler)
        self.is_unread = False
        item = next(self._items)
        self.seen.add(list(item) if self._takes_batches else [item])
        self.seen.ends.append(len(self.seen.order))
        return item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._items, name)


class WatchedLoaders(CombinedLoader):
    """A `CombinedLoader` from the first iterator of a run to its end: iterates `watched` in place of the user's own."""

    watched: list[Any]
    """The iterables that are read, in the order of `flattened`."""

    def __iter__(self) -> "WatchedLoaders":
        # Lightning: CombinedLoader.__iter__, which hands them to the iterator of its mode.
        users = self._flattened
        self._flattened = self.watched
        try:
            super().__iter__()
        finally:
            self._flattened = users
        return self

    def reset(self) -> None:
        """Called at the end of a run: turns this back into what it was before."""
        super().reset()
        self.__class__ = CombinedLoader  # type: ignore[assignment]
        del self.watched


WatchedLoaders.__name__ = CombinedLoader.__name__  # by which Lightning's messages name it
