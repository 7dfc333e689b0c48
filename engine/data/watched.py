"""Records the order of a user's loader in one process, which is read as it is, for the position in checkpoints."""

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from .drawing import OrderRecord, PassHistory, draws_at_once, is_same_state, state_before, state_of
from .workers import Workers, end_workers, has_workers

__all__ = ["Watched", "WatchedLoaders"]


_MOST_PENDING = 64
"""The number of batches that are recorded together: one by one they would take ten times as long."""


class _Seen(OrderRecord):
    """The order of one pass, recorded while it is read."""

    def __init__(self) -> None:
        self._pending: list[list[Any]] = []
        self._ends = array("q")
        super().__init__()

    def note(self, batch: list[Any]) -> None:
        """Records the next batch."""
        self._pending.append(batch)
        if len(self._pending) == _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            at = len(self._order)
            self._ends.extend(itertools.accumulate(map(len, pending[1:]), initial=at + len(pending[0])))
            self.add(list(itertools.chain.from_iterable(pending)))

    @property
    def order(self) -> Any:
        """The samples or batches that were read, in their order."""
        self._settle()
        return self._order

    @order.setter
    def order(self, order: Any) -> None:
        self._order = order

    @property
    def ends(self) -> "array[int]":
        """The position in the order after each batch."""
        self._settle()
        return self._ends


class Watched:
    """Iterates a loader and records its order; the loader keeps its sampler, batch sampler and workers.

    Args:
        loader: the user's.
        sampler: its `controlling_sampler`.
        epoch: returns the number of the current epoch.
        num_kept: returns the number of latest batches for which the states of workers are kept.
    """

    def __init__(self, loader: DataLoader, sampler: Any, epoch: Callable[[], int], num_kept: Callable[[], int]) -> None:
        self.loader = loader
        self.sampler = sampler
        self.workers = Workers(epoch, num_kept) if has_workers(loader) else None
        self.passes = PassHistory()
        self._epoch = epoch
        self._noted: _Noted | None = None
        self._iterator: _NotedIterator | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": None, "_noted": None, "_iterator": None}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader's iterator keeps the sampler that it finds when it is made: it is replaced for that moment only.
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
        """Called before a second iterator is made for an epoch in which nothing was trained yet."""
        if self._iterator is None or not self._iterator.is_unread:
            self.passes.begin_again(self._epoch())

    def begin(self, users: Any) -> "_NotedIterator":
        """Begins a pass over the user's sampler or batch sampler."""
        seen = _Seen()
        latest = self._iterator
        # torch: an iterator with workers asks its sampler for two iterators, and reads the second one only.
        is_unread = latest is not None and latest.is_unread and latest.seen is self.passes.latest
        has_drawn = self.loader.num_workers > 0 and draws_at_once(users, self.sampler)
        self.passes.begin(self._epoch(), seen, replaces_latest=is_unread, has_drawn=has_drawn)
        takes_batches = self.loader.batch_sampler is not None and self.sampler is not users
        self._iterator = _NotedIterator(users, self.sampler, seen, takes_batches)
        return self._iterator

    def size_of_batch(self, index: int) -> int | None:
        """Returns the number of samples of a batch of the epoch's first pass; None if there is no such batch."""
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
    """Wraps a user's sampler or batch sampler, and records its items."""

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
        """Whether no item was read yet."""
        # Some samplers draw when the iterator is made, most of them with the first item.
        self.seen.before = None if is_same_state(before, state_before(sampler)) else before

    def __iter__(self) -> "_NotedIterator":
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        if self.seen.before is None:
            self.seen.before = state_before(self._sampler)
        self.is_unread = False
        item = next(self._items)
        self.seen.note(list(item) if self._takes_batches else [item])
        return item

    def look_ahead(self) -> bool:
        """Reads one item ahead; returns whether there is one."""
        ahead, self._ahead = self._ahead, deque()
        try:
            ahead.append(next(self))
        except StopIteration:
            return False
        finally:
            self._ahead = ahead
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._items, name)


class WatchedLoaders(CombinedLoader):
    """A `CombinedLoader` that iterates `watched` instead of the user's loaders, from the first iterator of a run on."""

    watched: list[Any]
    """The iterables that are read, in the order of `flattened`."""

    def __iter__(self) -> "WatchedLoaders":
        # Lightning: CombinedLoader.__iter__, which gives them to the iterator of its mode.
        users = self._flattened
        self._flattened = self.watched
        try:
            super().__iter__()
        finally:
            self._flattened = users
        return self

    def reset(self) -> None:
        """Called at the end of a run: turns this into a plain `CombinedLoader` again."""
        for loader in self._flattened:
            end_workers(loader)
        super().reset()
        self.__class__ = CombinedLoader  # type: ignore[assignment]
        del self.watched


WatchedLoaders.__name__ = CombinedLoader.__name__  # by which Lightning's messages name it
