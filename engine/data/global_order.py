"""One order of samples for all ranks, split round-robin, which a run can resume in mid-epoch.

Position i of the epoch's order belongs to rank i mod W. So W ranks with batches of b samples train, step by step, on
the same samples as one process with batches of W*b. A run that stopped after position p resumes at p, with any number
of ranks and any batch size. The order is that of one process: the sampler draws from the same generators, in the states
of rank 0.

    position 0 1 2 3 4 5 6 7    (W = 2)
    rank     0 1 0 1 0 1 0 1
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

# Lightning: the class that replaces a user's sampler, and the class of its data set, which leads to the user's sampler.
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import RandomSampler

from .._compat.lightning import _DatasetSamplerWrapper
from .beside_others import not_beside_others
from .drawing import DrawnOrder, PassHistory, restore_sampler, state_of

__all__ = ["GlobalOrder", "Samples"]


class Samples(NamedTuple):
    """The number of samples in a batch."""

    local: int
    """The number on this rank; 0 for padding."""
    total: int
    """The number on all ranks together."""


_HIDDEN = ("state_dict", "load_state_dict")
"""Attributes of a user's sampler that are not passed on: they would be wrong for one rank's part of the order."""


class GlobalOrder(DistributedSamplerWrapper):
    """A sampler of this rank's part of another sampler's order.

    It is a subclass of `DistributedSampler`, and of Lightning's wrapper of a user's sampler, and has their attributes
    and those of `sampler`; none of their code is used.

    Args:
        sampler: gives the order of one process: the DataLoader's own sampler, or a batch sampler, whose batches are
            split over the ranks then. It draws from the generators of one process; of the global ones, from rank 0's.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        drop_last: leave out the samples of an incomplete round, rather than fill it with the first ones.
        broadcast: returns rank 0's value on all ranks, which all call it when a pass begins; None with one process.
        at_once: whether the order is drawn when an iterator is made, rather than with its first item.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        num_replicas: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        broadcast: Callable[[Any], Any] | None = None,
        at_once: bool = False,
    ) -> None:
        # Without the constructor of DistributedSampler, which needs a data set and makes an order of its own.
        self.sampler = sampler
        self.shuffle = isinstance(sampler, RandomSampler)
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = 0  # an attribute of DistributedSampler, without effect here
        self.drop_last = drop_last
        self.epoch = 0
        self.passes = PassHistory()
        self._broadcast = broadcast
        self._start = self._num_done = 0
        self._resumes = False
        self._at_end: Any = None
        self._at_once = at_once
        self.name_beside_others: str | None = None
        """The name of the loader in messages, if its items are the user's batches, read side by side with others'."""
        self.num_even_batches = 0.0
        """The number of batches on each rank, from the start of a pass, that must have as many samples on all ranks."""
        self._unread: DrawnOrder | None = None
        """A pass whose iterator was made, and of which nothing was read; None without one."""

    def __getattr__(self, name: str) -> Any:
        # Attributes of the user's sampler, such as its weights.
        if name.startswith("__") or name in _HIDDEN or "sampler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        sampler = self.__dict__["sampler"]
        if name == "dataset" and not hasattr(sampler, name) and hasattr(sampler, "__len__"):
            return _DatasetSamplerWrapper(sampler)
        return getattr(sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_broadcast": None, "_unread": None}

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, also of the user's sampler if it has `set_epoch`; Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self._start = self._num_done = 0
            self._resumes = False
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def resume(self, epoch: int, position: int, num_done: int, state: dict[str, Any] | None = None) -> None:
        """Resumes in mid-epoch.

        Args:
            epoch: the epoch.
            position: number of samples of the order that all ranks together have done.
            num_done: the part of this rank that counts as done, and that `len` includes: samples here, micro-batches in
                a `GlobalBatches`.
            state: what the method `state` returned in the saved run.
        """
        state = state or {}
        num_passes = state.get("num_passes", epoch)
        restore_sampler(self.sampler, num_passes, state.get("sampler"))
        self.set_epoch(epoch)
        self.passes.resume(num_passes)
        if state.get("before") is not None:
            whole = self._broadcast is not None or bool(state.get("whole"))
            self.passes.begin(epoch, DrawnOrder(self.sampler, whole=whole, before=state["before"]))
            self.seek(position, num_done)
            self._at_end = state.get("after")

    def settle(self) -> None:
        """Advances the generators past the resumed order, or to the epoch's end; called when its iterator exists."""
        if self.passes.latest is not None:
            self.passes.latest.settle()
            # Where `drop_last` leaves out the rest of the order, nothing is read of the epoch.
            self.passes.latest.go_on()
            if self._at_end is not None:
                self.passes.latest.end_with(self._at_end)
        self._at_end = None

    def seek(self, position: int, num_done: int) -> None:
        """Makes the next pass begin in mid-epoch; see `resume`."""
        self._start, self._num_done, self._resumes = position, num_done, True

    def count_done(self, num_done: int) -> None:
        """Sets how much of this rank's part counts as done."""
        self._num_done = num_done

    @property
    def start(self) -> int:
        """The position in the order at which this run began the epoch."""
        return self._start

    @property
    def num_done(self) -> int:
        """The part of the epoch that counts as done: samples, or micro-batches in a `GlobalBatches`."""
        return self._num_done

    def __len__(self) -> int:
        return self._num_done + self._rounds(len(self.sampler) - self._start)  # type: ignore[arg-type]

    def open(self) -> DrawnOrder | None:
        """Called when an iterator is created. If the order is drawn now, returns the pass; otherwise returns None.

        Otherwise the order is drawn with the first item, or, for a resumed pass, the saved run has drawn it.
        """
        if not self._at_once or self._resumes:
            return None
        drawing = DrawnOrder(self.sampler, whole=self._broadcast is not None, broadcast=self._broadcast)
        drawing.open()
        is_unread = self._unread is not None and self._unread is self.passes.latest
        self.passes.begin(self.epoch, drawing, replaces_latest=is_unread, has_drawn=True)
        self._unread = drawing
        return drawing

    def begin(self, opened: DrawnOrder | None = None) -> DrawnOrder:
        """Begins a pass; returns the order of all ranks together, positioned at the start of the pass.

        Args:
            opened: what `open` returned for it.
        """
        if opened is not None:
            self._unread = None if self._unread is opened else self._unread
            return opened
        if self._resumes and self.passes.latest is not None:
            drawing: DrawnOrder = self.passes.latest
            drawing.go_on()
            drawing.at, self._resumes = self._start, False
            return drawing
        # Only the first pass begins in mid-epoch: a loader that is shorter than another one restarts from the start.
        drawing = DrawnOrder(self.sampler, whole=self._broadcast is not None, broadcast=self._broadcast)
        self.passes.begin(self.epoch, drawing)
        return drawing

    def __iter__(self) -> Iterator[Any]:
        return self._items(self.open())

    def _items(self, opened: DrawnOrder | None) -> Iterator[Any]:
        drawing = self.begin(opened)
        num_rounds = self._rounds(len(self.sampler) - drawing.at)  # type: ignore[arg-type]
        if self.name_beside_others is not None:
            self._check_sizes(drawing, int(min(num_rounds, self.num_even_batches)), self.name_beside_others)
        for _ in range(num_rounds):
            taken = drawing.take(self.num_replicas)
            # Every rank needs equally many samples for the collectives of each step: the first samples are repeated.
            yield taken[self.rank] if self.rank < len(taken) else self._first(drawing, self.rank - len(taken))
        drawing.take(1)

    def _check_sizes(self, drawing: DrawnOrder, num_rounds: int, name: str) -> None:
        """Checks that in each step of a pass the batches of all ranks have the same size.

        Loaders that are read side by side with others need this.

        Raises:
            ValueError: the batches of one step have different sizes.
        """
        at, num_ranks = drawing.at, self.num_replicas
        order = drawing.up_to(at + num_rounds * num_ranks)
        for first in range(at, at + num_rounds * num_ranks, num_ranks):
            sizes = [len(batch) for batch in order[first : first + num_ranks]]
            if len(set(sizes)) > 1:
                problem = f"has batches of {sizes} samples for a step"
                raise not_beside_others(name, problem, "Give it a batch sampler with batches of one size, or none")

    def _first(self, drawing: DrawnOrder, index: int) -> Any:
        return drawing.order[index % len(drawing.order)]

    def _rounds(self, size: int) -> int:
        return max(0, size // self.num_replicas if self.drop_last else -(-size // self.num_replicas))

    def first(self) -> Any:
        """Returns the first item of the latest pass's order."""
        return (self.passes.latest or self.begin()).up_to(1)[0]

    def samples(self, index: int) -> Samples:
        """Counts the samples of batch `index` of the epoch, of a user's batch sampler."""
        first = self._start + (index - self._num_done) * self.num_replicas
        order = (self.passes.latest or self.begin()).up_to(first + self.num_replicas)
        sizes = [len(batch) for batch in order[first : first + self.num_replicas]]
        return Samples(sizes[self.rank] if self.rank < len(sizes) else 0, sum(sizes))

    def state(self, epoch: int, number: int) -> dict[str, Any]:
        """Returns the plain values from which another run draws a pass again, or the next pass if it has not begun.

        Args:
            epoch: the current epoch, or the next one.
            number: number of the pass, in the epoch.
        """
        drawing = self.passes.of(epoch, number)
        return {
            "before": None if drawing is None else drawing.before,
            "sampler": state_of(self.sampler) if drawing is None or drawing.before is None else None,
            "whole": drawing is not None and drawing.is_whole,
            "num_passes": self.passes.num_until(epoch, number),
        }
