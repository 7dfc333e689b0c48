"""Batches of all ranks together: step k trains on the same samples, however many ranks share them.

The order of an epoch is cut into global batches of N samples. Sample i of one belongs to rank i mod W, so the ranks'
shares differ by at most one sample; each share is cut into equally many micro-batches of at most m samples, whose sizes
again differ by at most one:

    micro-batches per step = ceil(ceil(N / W) / m)

The last global batch of an epoch may be smaller. A rank without a sample for a micro-batch, which is still to take part
in its collectives, gets a filler: some sample of the global batch that counts for nothing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from ..flags import check_count
from .drawing import left_alone
from .global_order import GlobalOrder, Samples

__all__ = ["GlobalBatches", "InOneRow"]


class GlobalBatches(Sampler[list[Any]]):
    """This rank's micro-batches, a batch sampler.

    Args:
        order: of all samples.
        size: samples of a global batch, N.
        micro_batch_size: samples of a rank's micro-batch at most, m.
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(self, order: GlobalOrder, *, size: int, micro_batch_size: int, drop_last: bool = False) -> None:
        self.sampler = order
        self.size = check_count("global_batch_size", size)
        self._micro_batch_size = check_count("micro_batch_size", micro_batch_size)
        self.drop_last = drop_last

    @property
    def batch_size(self) -> int:
        """Samples of a rank's micro-batch at most."""
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
        """Cuts global batches into micro-batches of at most so many samples, from the next pass on."""
        self._micro_batch_size = check_count("micro_batch_size", micro_batch_size)

    @property
    def per_step(self) -> int:
        """Micro-batches that a full global batch is cut into."""
        return self._num_cuts(self.size)

    def num_batches(self, num_samples: int) -> int:
        """Micro-batches of each rank that so many samples of the order make."""
        full, rest = divmod(num_samples, self.size)
        return full * self.per_step + (0 if self.drop_last or not rest else self._num_cuts(rest))

    def num_samples(self, num_batches: int) -> int:
        """The samples of the order that full global batches of so many micro-batches have."""
        return num_batches // self.per_step * self.size

    def samples(self, index: int) -> Samples:
        """Counts the samples of the micro-batch `index` of the epoch, where those done before a resumption count in."""
        window, cut = divmod(index - self.sampler.num_done, self.per_step)
        size = min(self.size, len(self.sampler.sampler) - self.sampler.start - window * self.size)  # type: ignore[arg-type]
        num_cuts = self._num_cuts(size)
        share, num_larger = divmod(size, self.sampler.num_replicas)
        smaller, larger = _part(share, num_cuts, cut), _part(share + 1, num_cuts, cut)
        return Samples(
            larger if self.sampler.rank < num_larger else smaller,
            num_larger * larger + (self.sampler.num_replicas - num_larger) * smaller,
        )

    def __len__(self) -> int:
        return self.sampler.num_done + self.num_batches(len(self.sampler.sampler) - self.sampler.start)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        drawing, rank, num_ranks = self.sampler.begin(), self.sampler.rank, self.sampler.num_replicas
        while taken := drawing.take(self.size):
            if self.drop_last and len(taken) < self.size:
                return
            share = taken[rank::num_ranks]
            num_cuts, at = self._num_cuts(len(taken)), 0
            for cut in range(num_cuts):
                size = _part(len(share), num_cuts, cut)
                yield share[at : at + size] or taken[:1]
                at += size

    def _num_cuts(self, size: int) -> int:
        return _ceil(_ceil(size, self.sampler.num_replicas), self.batch_size)


class InOneRow:
    """The samples of a batch sampler, one after the other; where its batches end, global batches must be able to end.

    Args:
        batches: the batch sampler.
        size: samples of a global batch.
    """

    def __init__(self, batches: Any, size: int) -> None:
        self.batches = batches
        self._size = size
        self._row: list[Any] | None = None

    @property
    def generator(self) -> Any:
        """The one that the order is drawn from, if it is the user's."""
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
        if self._row is None:
            with left_alone(self):
                self._row = list(self._draw())
        return len(self._row)

    def __iter__(self) -> Iterator[Any]:
        self._row = list(self._draw())
        return iter(self._row)

    def _draw(self) -> Iterable[Any]:
        within = 0
        for batch in self.batches:
            within += len(batch)
            if within > self._size:
                raise ValueError(
                    f"global_batch_size={self._size} would end within a batch of {type(self.batches).__name__}: after"
                    f" {within - len(batch)} samples of a global batch it has one of {len(batch)}. Give a multiple of"
                    " its batches' sizes, or a DataLoader without a batch sampler of your own."
                )
            within %= self._size
            yield from batch


def _part(size: int, num_parts: int, index: int) -> int:
    """Size of a part of `size` things that are cut as evenly as they can be."""
    return size // num_parts + (index < size % num_parts)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
