"""One order of samples for all ranks, split round-robin, which a run can resume in mid-epoch.

Position i of the epoch's order belongs to rank i mod W. So W ranks with batches of b samples train, step by step, on
the same samples as one process with batches of W*b. A run that stopped after position p resumes at p, with any number
of ranks and any batch size. The order is that of one process: the sampler draws from the same generators, in the states
of rank 0.

    position 0 1 2 3 4 5 6 7    (W = 2)
    rank     0 1 0 1 0 1 0 1
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

# Lightning: the class that replaces a user's sampler, and the class of its data set, which leads to the user's sampler.
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import RandomSampler, Sampler

from .._compat.lightning import _DatasetSamplerWrapper
from ..flags import check_count
from .drawing import DrawnOrder, PassHistory, preserve_generators, restore_sampler, state_of

__all__ = ["SHARE_EVENLY", "FlattenedBatchSampler", "GlobalBatches", "GlobalOrder", "Samples", "not_beside_others"]


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


SHARE_EVENLY = "Give each rank as much of it, or set uneven='drop' and this loader's drop_last=True"
"""The remedy for a stream, or for separate samplers of the ranks."""


def not_beside_others(name: str, problem: str, remedy: str) -> ValueError:
    """Returns the error for a loader that is read side by side with others, and whose samples are shared unevenly.

    Args:
        name: name of the loader, the subject of the message.
        problem: verb and object of the message.
        remedy: advice at the end of the message.
    """
    return ValueError(
        f"{name} is read side by side with others, and {problem}, which the ranks can't share evenly. A step has one"
        " loss of all these loaders, which can't be weighed by the samples of each: some would count for more than in"
        f" one process. {remedy}."
    )


# Global batches: step k trains on the same samples for any number of ranks.
#
# The order of an epoch is cut into global batches of N samples. Sample i of a global batch belongs to rank i mod W, so
# the ranks' shares differ by at most one sample. Each share is cut into equally many micro-batches of at most m
# samples, whose sizes again differ by at most one:
#
#     micro-batches per step = ceil(ceil(N / W) / m)
#
# The last global batch of an epoch may be smaller. A rank without a sample for a micro-batch still takes part in its
# collectives: it gets padding, a sample of the global batch that counts for nothing.


class GlobalBatches(Sampler[list[Any]]):
    """A batch sampler that yields this rank's micro-batches.

    Args:
        order: order of all samples.
        size: samples of a global batch, N.
        micro_batch_size: the most samples of a rank's micro-batch, m.
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(self, order: GlobalOrder, *, size: int, micro_batch_size: int, drop_last: bool = False) -> None:
        self.sampler = order
        self.size = check_count("global_batch_size", size)
        self._micro_batch_size = check_count("micro_batch_size", micro_batch_size)
        self.drop_last = drop_last
        self._count_cuts()

    @property
    def batch_size(self) -> int:
        """The most samples of a rank's micro-batch."""
        return self._micro_batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if size != self._micro_batch_size:
            raise ValueError(
                f"batch_sampler.batch_size = {size}: several ranks share these batches, or a resumed epoch goes on in"
                f" them, so that their size, {self._micro_batch_size}, can't change during the run. Give the DataLoader"
                " another batch_size before `fit`, or let `train_dataloader` return another DataLoader with"
                " reload_dataloaders_every_n_epochs."
            )

    def cut_into(self, micro_batch_size: int) -> None:
        """Cuts global batches into micro-batches of at most `micro_batch_size` samples, from the next pass on."""
        self._micro_batch_size = check_count("micro_batch_size", micro_batch_size)
        self._count_cuts()

    def _count_cuts(self) -> None:
        self._per_step = self._num_cuts(self.size)
        self._of_full: list[Samples] = []

    def _of_full_batch(self, cut: int) -> Samples:
        """Returns the samples of a micro-batch of a full global batch; counted when the data has one: see `size`."""
        if not self._of_full:
            self._of_full = [self._samples_of(self.size, self._per_step, i) for i in range(self._per_step)]
        return self._of_full[cut]

    @property
    def per_step(self) -> int:
        """The number of micro-batches of a full global batch, on each rank."""
        return self._per_step

    def num_batches(self, num_samples: int) -> int:
        """Returns the number of micro-batches on each rank for `num_samples` samples of the order."""
        full, rest = divmod(num_samples, self.size)
        return full * self.per_step + (0 if self.drop_last or not rest else self._num_cuts(rest))

    def num_samples(self, num_batches: int) -> int:
        """Returns the number of samples in full global batches that have `num_batches` micro-batches together."""
        return num_batches // self.per_step * self.size

    def samples(self, index: int) -> Samples:
        """Counts the samples of micro-batch `index` of the epoch, counted from its start, also in a resumed run."""
        order, full = self.sampler, self.size
        window, cut = divmod(index - order.num_done, self._per_step)
        left = len(order.sampler) - order.start - window * full  # type: ignore[arg-type]
        if left >= full:
            return self._of_full_batch(cut)
        return self._samples_of(left, self._num_cuts(left), cut)

    def counter(self) -> Callable[[int], Samples]:
        """Returns a function that does the same as `samples`, for the present pass only."""
        order = self.sampler
        num_full = (len(order.sampler) - order.start) // self.size * self._per_step  # type: ignore[arg-type]
        return functools.partial(self._samples_in_pass, order.num_done, num_full)

    def _samples_in_pass(self, first: int, num_full: int, index: int) -> Samples:
        """Returns `samples(index)`; the `num_full` micro-batches from `first` on belong to full global batches."""
        at = index - first
        return self._of_full_batch(at % self._per_step) if at < num_full else self.samples(index)

    def _samples_of(self, size: int, num_cuts: int, cut: int) -> Samples:
        """Counts the samples of one of `num_cuts` micro-batches of a global batch of `size` samples."""
        order = self.sampler
        share, num_larger = divmod(size, order.num_replicas)
        smaller, larger = _part(share, num_cuts, cut), _part(share + 1, num_cuts, cut)
        return Samples(
            larger if order.rank < num_larger else smaller,
            num_larger * larger + (order.num_replicas - num_larger) * smaller,
        )

    def __len__(self) -> int:
        return self.sampler.num_done + self.num_batches(len(self.sampler.sampler) - self.sampler.start)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        return self._cuts(self.sampler.open())

    def _cuts(self, opened: DrawnOrder | None) -> Iterator[list[Any]]:
        drawing, rank, num_ranks = self.sampler.begin(opened), self.sampler.rank, self.sampler.num_replicas
        while taken := drawing.take(self.size):
            if self.drop_last and len(taken) < self.size:
                return
            share = taken[rank::num_ranks]
            num_cuts, at = self._per_step if len(taken) == self.size else self._num_cuts(len(taken)), 0
            if num_cuts == 1:
                yield share or taken[:1]
                continue
            for cut in range(num_cuts):
                size = _part(len(share), num_cuts, cut)
                yield share[at : at + size] or taken[:1]
                at += size

    def _num_cuts(self, size: int) -> int:
        return _ceil(_ceil(size, self.sampler.num_replicas), self.batch_size)


class FlattenedBatchSampler:
    """Yields the samples of a batch sampler one by one; a global batch must end where one of its batches ends.

    Args:
        batches: the batch sampler.
        size: samples of a global batch.
    """

    def __init__(self, batches: Any, size: int) -> None:
        self.batches = batches
        self._size = size
        self._samples: list[Any] | None = None

    @property
    def generator(self) -> Any:
        """The user's generator that the order is drawn from; None without one."""
        return getattr(self.batches, "generator", None) or getattr(self._inner, "generator", None)

    @property
    def _inner(self) -> Any:
        return getattr(self.batches, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch to the batch sampler and the sampler within it, where they have `set_epoch`."""
        for part in (self.batches, self._inner):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        if self._samples is None:
            with preserve_generators(self):
                self._samples = list(self._draw())
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        self._samples = list(self._draw())
        return iter(self._samples)

    def _draw(self) -> Iterable[Any]:
        filled = 0  # samples of the current global batch
        for batch in self.batches:
            filled += len(batch)
            if filled > self._size:
                raise ValueError(
                    f"global_batch_size={self._size} would end within a batch of {type(self.batches).__name__}: after"
                    f" {filled - len(batch)} samples of a global batch it has one of {len(batch)}. Give a multiple of"
                    " its batches' sizes, or a DataLoader without a batch sampler of your own."
                )
            filled %= self._size
            yield from batch


def _part(size: int, num_parts: int, index: int) -> int:
    """Returns the size of one of `num_parts` parts of `size` items that differ by at most one."""
    return size // num_parts + (index < size % num_parts)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
