"""Global batches: step k trains on the same samples for any number of ranks.

The order of an epoch is cut into global batches of N samples. Sample i of a global batch belongs to rank i mod W, so
the ranks' shares differ by at most one sample. Each share is cut into equally many micro-batches of at most m samples,
whose sizes again differ by at most one:

    micro-batches per step = ceil(ceil(N / W) / m)

The last global batch of an epoch may be smaller. A rank without a sample for a micro-batch still takes part in its
collectives: it gets padding, a sample of the global batch that counts for nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from ..flags import check_count
from .drawing import DrawnOrder, preserve_generators
from .global_order import GlobalOrder, Samples

__all__ = ["FlattenedBatchSampler", "GlobalBatches"]


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
