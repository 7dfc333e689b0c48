"""One order of samples for all ranks, dealt round-robin, that can be gone on with in mid-epoch.

Position i of the epoch's order belongs to rank i mod W. So W ranks with batches of b samples train, step by step, on
the same samples as one process with batches of W*b; and a run that stopped after position p goes on at p, whatever its
number of ranks and its batch size have become. The order is that of one process: the sampler draws from the generators
that it would draw from there, in the states that they would be in, which are rank 0's.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

# Lightning: what it puts in the place of a user's sampler, and the data set of that, by which others find the user's.
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _DatasetSamplerWrapper
from torch.utils.data import RandomSampler

from .drawing import Drawing, Passes, bring_to, state_of

__all__ = ["GlobalOrder", "Samples"]


class Samples(NamedTuple):
    """The number of samples in a batch."""

    mine: int
    """The number on this rank; 0 for a batch that only fills up."""
    all: int
    """The number on all ranks together."""


_NOT_OURS = ("state_dict", "load_state_dict")
"""Attributes of a user's sampler that are not passed on: they would be wrong for its order as it is dealt."""


class GlobalOrder(DistributedSamplerWrapper):
    """This rank's part of the order that `sampler` yields.

    To whoever asks a `DistributedSampler`, and Lightning's wrapper of a user's sampler, with their attributes and those
    of `sampler`; none of their code is used.

    Args:
        sampler: the order of one process: the DataLoader's own sampler, or a batch sampler, whose batches are dealt
            then. Each pass draws from the generators that it would draw from in one process; what it takes from global
            ones, where ranks differ, it takes from rank 0's.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        drop_last: leave out the samples that don't fill a whole round, rather than repeat the first ones.
        hand_on: gives all ranks what rank 0 gives, when a pass begins; all ranks call it together. None where there
            is one process.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        num_replicas: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        hand_on: Callable[[Any], Any] | None = None,
    ) -> None:
        # Not the constructor of DistributedSampler, which wants a data set and makes an order of its own.
        self.sampler = sampler
        self.shuffle = isinstance(sampler, RandomSampler)
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = 0  # of DistributedSampler's, and of no use here
        self.drop_last = drop_last
        self.epoch = 0
        self.passes = Passes()
        self._hand_on = hand_on
        self._start = self._num_done = 0
        self._resumes = False
        self._at_end: Any = None

    def __getattr__(self, name: str) -> Any:
        # Those of the user's sampler, say its weights.
        if name.startswith("__") or name in _NOT_OURS or "sampler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        sampler = self.__dict__["sampler"]
        if name == "dataset" and not hasattr(sampler, name) and hasattr(sampler, "__len__"):
            return _DatasetSamplerWrapper(sampler)
        return getattr(sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hand_on": None}

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes to a sampler that wants to know; Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self._start = self._num_done = 0
            self._resumes = False
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def resume(self, epoch: int, position: int, num_done: int, state: dict[str, Any] | None = None) -> None:
        """Goes on in mid-epoch.

        Args:
            epoch: the epoch.
            position: number of samples of the order that all ranks together are done with.
            num_done: what counts as done of this rank's part: samples here, which `len` includes; micro-batches in a
                `GlobalBatches`.
            state: what the method of that name said in the run that is resumed.
        """
        state = state or {}
        num_passes = state.get("num_passes", epoch)
        bring_to(self.sampler, num_passes, state.get("sampler"))
        self.set_epoch(epoch)
        self.passes.resume(num_passes)
        if state.get("before") is not None:
            whole = self._hand_on is not None or bool(state.get("whole"))
            self.passes.begin(epoch, Drawing(self.sampler, whole=whole, before=state["before"]))
            self.go_on_at(position, num_done)
            self._at_end = state.get("after")

    def settle(self) -> None:
        """Called when the iterator of a resumed epoch is there: if that was at its end, no more is drawn for it."""
        if self.passes.latest is not None:
            self.passes.latest.settle()
            if self._at_end is not None:
                self.passes.latest.end_with(self._at_end)
        self._at_end = None

    def go_on_at(self, position: int, num_done: int) -> None:
        """Lets the next pass begin in mid-epoch; see `resume`."""
        self._start, self._num_done, self._resumes = position, num_done, True

    def count_done(self, num_done: int) -> None:
        """Says anew how much of this rank's part counts as done."""
        self._num_done = num_done

    @property
    def start(self) -> int:
        """Position in the order at which this run began the epoch."""
        return self._start

    @property
    def num_done(self) -> int:
        """The amount of the epoch that counts as done, in the unit of whoever counted."""
        return self._num_done

    def __len__(self) -> int:
        return self._num_done + self._rounds(len(self.sampler) - self._start)  # type: ignore[arg-type]

    def begin(self) -> Drawing:
        """A pass over the order of all ranks together, from where it begins."""
        if self._resumes and self.passes.latest is not None:
            drawing: Drawing = self.passes.latest
            drawing.go_on()
            drawing.at, self._resumes = self._start, False
            return drawing
        # Only the first pass begins in the middle: a shorter loader beside a longer one may pass again in an epoch.
        drawing = Drawing(self.sampler, whole=self._hand_on is not None, hand_on=self._hand_on)
        self.passes.begin(self.epoch, drawing)
        return drawing

    def __iter__(self) -> Iterator[Any]:
        drawing = self.begin()
        for _ in range(self._rounds(len(self.sampler) - drawing.at)):  # type: ignore[arg-type]
            taken = drawing.take(self.num_replicas)
            # Every rank needs as many samples as the others, since they meet at each step: the first ones fill it up.
            yield taken[self.rank] if self.rank < len(taken) else self._first(drawing, self.rank - len(taken))
        drawing.take(1)

    def _first(self, drawing: Drawing, index: int) -> Any:
        return drawing.order[index % len(drawing.order)]

    def _rounds(self, size: int) -> int:
        return max(0, size // self.num_replicas if self.drop_last else -(-size // self.num_replicas))

    def first(self) -> Any:
        """The first item of the order of the latest pass."""
        return (self.passes.latest or self.begin()).up_to(1)[0]

    def samples(self, index: int) -> Samples:
        """Counts the samples of a dealt batch by its index in the epoch: this rank's, and those on all ranks."""
        first = self._start + (index - self._num_done) * self.num_replicas
        order = (self.passes.latest or self.begin()).up_to(first + self.num_replicas)
        sizes = [len(batch) for batch in order[first : first + self.num_replicas]]
        return Samples(sizes[self.rank] if self.rank < len(sizes) else 0, sum(sizes))

    def state(self, epoch: int, number: int) -> dict[str, Any]:
        """Returns the plain values with which another run draws a pass again, or the next one if that has not begun.

        Args:
            epoch: the present one, or the one after it.
            number: of the pass, in the epoch.
        """
        drawing = self.passes.of(epoch, number)
        return {
            "before": None if drawing is None else drawing.before,
            "sampler": state_of(self.sampler) if drawing is None or drawing.before is None else None,
            "whole": drawing is not None and drawing.is_whole,
            "num_passes": self.passes.num_until(epoch, number),
        }
