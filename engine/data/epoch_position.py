"""The position of a run in its training data: a checkpoint's state of each loader, and how another run continues."""

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, SequentialSampler

from ..checkpoint.rng import is_same_state
from .drawing import OrderRecord, PassHistory, draws_at_once, state_before, state_of
from .even_batches import is_custom
from .global_order import GlobalBatches, GlobalOrder
from .workers import Workers, end_workers, has_workers

__all__ = ["EpochPosition", "Watched", "WatchedLoaders", "controlling_sampler", "order_of", "tell_batch_sampler"]


class _Seen(OrderRecord):
    """The order of one pass, recorded while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = array("q")
        """The position in the order after each batch."""


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
        seen = self.seen
        seen.add(list(item) if self._takes_batches else [item])
        seen.ends.append(len(seen.order))
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
        end_workers(self._flattened)
        super().reset()
        self.__class__ = CombinedLoader  # type: ignore[assignment]
        del self.watched


WatchedLoaders.__name__ = CombinedLoader.__name__  # by which Lightning's messages name it


_KNOWN = {"before": {"global": None, "sampler": None}, "sampler": None, "whole": False, "num_passes": 0}
"""The state of an order that is equal in each run, and was not recorded."""


def order_of(loader: DataLoader) -> GlobalOrder | None:
    """Returns the `GlobalOrder` of `loader`; None if it has none."""
    batches: Any = loader.batch_sampler
    for candidate in (batches, getattr(batches, "sampler", None), loader.sampler):
        if isinstance(candidate, GlobalOrder):
            return candidate
    return None


def controlling_sampler(loader: DataLoader) -> Any:
    """Returns the sampler that decides the order of samples, or a batch sampler of the user's own."""
    batches: Any = loader.batch_sampler
    is_users = is_custom(batches) and not isinstance(batches, GlobalBatches)
    return batches if is_users else getattr(batches, "sampler", loader.sampler)


def tell_batch_sampler(loader: Any, epoch: int) -> None:
    """Sets the epoch of a user's batch sampler that has `set_epoch`.

    Lightning sets it on a loader's sampler, and on the sampler within a batch sampler, but not on the batch sampler.
    With several ranks, a `GlobalOrder` sets it.
    """
    if not isinstance(loader, DataLoader) or order_of(loader) is not None or _unit(loader) != "batches":
        return
    if callable(set_epoch := getattr(loader.batch_sampler, "set_epoch", None)):
        set_epoch(epoch)


def _unit(loader: DataLoader) -> str:
    """Returns the items of a loader's order: ``"samples"`` or ``"batches"``."""
    return "batches" if controlling_sampler(loader) is loader.batch_sampler else "samples"


def _per_rank(loader: DataLoader) -> int:
    """Returns the number of items of its order that a rank takes for one batch."""
    return 1 if _unit(loader) == "batches" else getattr(loader.batch_sampler, "batch_size", 1)


def _is_same(order: GlobalOrder, state: dict[str, Any]) -> bool:
    """Whether `order` begins with the items that the saved run has trained on."""
    drawing, position = order.passes.latest, state["position"]
    if drawing is None:
        return not position
    drawing.up_to(position)
    if state["digest"] is not None:
        return state["digest"] == drawing.digest(position)
    # The saved run did not read the sampler: it trained in the order of the data set, or in an unknown one.
    return not state["in_order"] or list(drawing.order[:position]) == list(range(position))


@dataclasses.dataclass
class EpochPosition:
    """The position of a run in an epoch of one loader, a part of which another run may have done."""

    loader: DataLoader
    world_size: int
    """Number of ranks that share the loader's order; 1 if each rank has its own sampler."""
    position: int = 0
    """The position in the epoch's order at which this run began."""
    batches: int = 0
    """The number of this rank's batches that count as done before this run."""
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """The ranges of the order that earlier runs have trained on, each with its number of ranks."""
    cycles: bool = True
    """Whether the loader restarts within the epoch if it is shorter than another one."""
    began_again: bool = False
    """Whether the loader had restarted in an earlier run."""
    watched: Watched | None = None
    """The wrapper that records the order, if the loader is the user's own."""

    @classmethod
    def resumed(cls, loader: DataLoader, world_size: int, state: dict[str, Any]) -> "EpochPosition":
        """Resumes at the position in `state`, of any rank: the loader's first iterator yields the rest of the epoch.

        Raises:
            ValueError: the loader has another order than that of the saved run.
        """
        order, position = order_of(loader), state["position"]
        assert order is not None
        resumed_position = cls(loader, world_size, position, ledger=state["ledger"], began_again=state["began_again"])
        order.resume(state["epoch"], position, 0, state["order"])
        resumed_position.count(resumed_position._batches_before(position))
        unit, length = _unit(loader), len(order.sampler)  # type: ignore[arg-type]
        if position and ((unit, length) != (state["unit"], state["length"]) or not _is_same(order, state)):
            raise ValueError(
                f"The checkpoint was saved after {position} of {state['length']} {state['unit']} of the epoch, which"
                f" this run's DataLoader, of {length} {unit}, does not yield in the same order: use the same data, the"
                " same seed (seed_everything) and the same sampler; your own sampler, if it draws from a generator,"
                " needs `state_dict` and `load_state_dict`. To begin an epoch instead, load only the weights."
            )
        return resumed_position

    @property
    def _dealt(self) -> GlobalBatches | None:
        batches = self.loader.batch_sampler
        return batches if isinstance(batches, GlobalBatches) else None

    @property
    def per_step(self) -> tuple[int, int]:
        """The items of the order that a step takes on all ranks together, and the number of batches on each rank."""
        if self._dealt is not None:
            return self._dealt.size, self._dealt.per_step
        return self.world_size * _per_rank(self.loader), 1

    def count(self, batches: int) -> None:
        """Sets the number of this rank's batches that count as done: all loaders advance equally."""
        self.batches = batches
        order = order_of(self.loader)
        if order is not None and not self.began_again:
            order.count_done(batches if self._dealt is not None else batches * _per_rank(self.loader))

    def state_dict(self, epoch: int, batches: int, *, begins: bool = False) -> dict[str, Any]:
        """Returns the position after `batches` batches of the epoch on this rank, including those of earlier runs.

        Args:
            epoch: the current epoch, or the next one.
            batches: batches of this rank.
            begins: whether nothing of the epoch was trained on yet.
        """
        source: Any = order_of(self.loader) or self.watched
        decided = source.sampler if source is not None else controlling_sampler(self.loader)
        length, start, began_again, number = len(decided), self.position, self.began_again, 0
        done, first = batches - self.batches, self._batches_from(start, length)
        if self.cycles and done > first:
            began_again, start, per_pass = True, 0, max(1, self._batches_from(0, length))
            # At the end of a pass, the next pass has not begun.
            again, done = divmod(done - first - 1, per_pass)
            number, done = again + 1, done + 1
        record = None if source is None else source.passes.of(epoch, number)
        position = self._position(start, done, length, record)
        order = _KNOWN if source is None else source.state(epoch, number)
        if begins and source is not None and source.passes.of(epoch, number) is not None:
            # The iterator exists already: it may have drawn the workers' seed, and the order.
            order = {**order, "begun": torch.get_rng_state()}
        if position == length and order["before"] is not None:
            order = {**order, "after": state_of(decided)}
        return {
            "epoch": epoch,
            "unit": _unit(self.loader),
            "position": position,
            "length": length,
            "per_step": list(self.per_step),
            "num_sharing": self.world_size,
            "began_again": began_again,
            "digest": None if record is None else record.digest(position),
            "in_order": type(decided) is SequentialSampler,
            "order": order,
            "ledger": [*self.ledger, {"from": start, "to": position, "world_size": self.world_size}],
        }

    def indices(self, epoch: int, first: int, num_batches: int, rank: int | None) -> list[Any] | None:
        """Returns the samples of batches of an epoch's first pass; None if they are not known any more.

        Args:
            epoch: the current epoch.
            first: the first batch of this rank, with which a step begins.
            num_batches: number of batches, to the end of that step.
            rank: index of the rank whose samples they are; None: those of all that share the order.
        """
        source: Any = order_of(self.loader) or self.watched
        record = None if source is None else source.passes.of(epoch, 0)
        if record is None or first < self.batches:
            return None
        begin, end = (
            self._position(self.position, done - self.batches, len(source.sampler), record)
            for done in (first, first + num_batches)
        )
        items = list(record.order[begin:end])
        if rank is not None and self.world_size > 1:
            items = items[rank :: self.world_size]
        return [index for batch in items for index in batch] if _unit(self.loader) == "batches" else items

    def _position(self, start: int, done: int, length: int, record: Any) -> int:
        ends = getattr(record, "ends", ())
        if 0 < done <= len(ends):
            return min(length, ends[done - 1])  # exact, even if the user's batches differ in size
        num_items, num_batches = self.per_step
        steps, more = divmod(done, num_batches)
        # Only the last step of an epoch has fewer batches.
        steps += bool(more) and done >= self._batches_from(start, length)
        return min(length, start + steps * num_items)

    def _batches_before(self, position: int) -> int:
        num_items, num_batches = self.per_step
        return position // num_items * num_batches

    def _batches_from(self, start: int, length: int) -> int:
        if self._dealt is not None:
            return self._dealt.num_batches(length - start)
        drops = getattr(order_of(self.loader) or self.loader.batch_sampler, "drop_last", False)
        (num_items, _), left = self.per_step, length - start
        return left // num_items if drops else -(-left // num_items)
