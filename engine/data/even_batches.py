"""Each sample once over all ranks, in as many batches on each rank: what evaluation reads.

The order of one process is cut into windows of W*b samples (W ranks, batches of b). Within a window rank r has the r-th
contiguous slice; in the last, short window the slices differ by at most one sample. So (window, rank) order is the
order of the data set, and the ranks go from batch to batch together, as the collectives of a forward pass need it.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torchdata.stateful_dataloader import sampler as torchdatas

from .global_order import GlobalOrder

__all__ = ["EvenBatches", "check_length", "evaluated_order", "even_batches_of", "is_own"]


class EvenBatches(Sampler[Any]):
    """This rank's batches in evaluation.

    Where the last window has fewer items than there are ranks, those without one get a *ghost*: an item that another
    rank has as well, to be run for its collectives only. `num_real` says from which batch on.

    Args:
        order: the order of one process, in one piece.
        batch_size: samples a batch, b; None where the items of `order` go to the ranks one by one, as they are: batches
            of a batch sampler of the user's own, or samples of a loader without batches.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        drop_last: leave out the samples that one process would leave out, with batches of b: fewer than b of them,
            however many ranks there are.
    """

    def __init__(
        self,
        order: GlobalOrder,
        batch_size: int | None = None,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.sampler = order  # by this name Lightning finds it, to set the epoch
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes."""
        self.sampler.set_epoch(epoch)

    @property
    def size(self) -> int:
        """Items that all ranks together evaluate."""
        size = len(self.sampler)
        return size - size % (self.batch_size or 1) if self.drop_last else size

    @property
    def num_real(self) -> int:
        """Number of this rank's batches that are no ghosts; they come first."""
        return len(self) - (0 < self._size_of_last < self.num_replicas and self.rank >= self._size_of_last)

    @property
    def has_ghosts(self) -> bool:
        """Whether some rank has a ghost."""
        return 0 < self._size_of_last < self.num_replicas

    @property
    def leaves_some_idle(self) -> bool:
        """Whether some rank has nothing but a ghost."""
        return 0 < self.size < self.num_replicas

    @property
    def _window(self) -> int:
        return self.num_replicas * (self.batch_size or 1)

    @property
    def _size_of_last(self) -> int:
        return self.size - max(0, len(self) - 1) * self._window

    def __len__(self) -> int:
        return -(-self.size // self._window)

    def __iter__(self) -> Iterator[Any]:
        drawing, size = self.sampler.begin(), self.size
        for start in range(0, size, self._window):
            window = drawing.take(self._window)[: size - start]
            least, num_longer = divmod(len(window), self.num_replicas)
            begin = self.rank * least + min(self.rank, num_longer)
            mine = list(window[begin : begin + least + (self.rank < num_longer)] or window[-1:])
            yield mine[0] if self.batch_size is None else mine


def even_batches_of(loader: Any) -> EvenBatches | None:
    """The even batches that `loader` yields, if they are ours."""
    batches = getattr(loader, "batch_sampler", None)
    # Lightning: _IndexBatchSamplerWrapper, which notes the indices of a prediction, keeps the original by this name.
    for candidate in (batches, getattr(batches, "_batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(candidate, EvenBatches):
            return candidate
    return None


def is_own(batch_sampler: Any) -> bool:
    """Whether a batch sampler is one of the user's own, whose batches are not for us to cut."""
    return batch_sampler is not None and type(batch_sampler) not in (BatchSampler, torchdatas.BatchSampler)


def check_length(order: Any) -> None:
    """Checks that a sampler or batch sampler can be shared by ranks.

    Raises:
        TypeError: nobody knows how much it is.
    """
    try:
        len(order)
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"{type(order).__name__}, which gives the order of a DataLoader, has no __len__: the ranks can't share what"
            " they don't know the end of. Give it one, or deal its samples yourself with use_distributed_sampler=False."
        ) from None


def evaluated_order(loader: DataLoader, batch_sampler: Any) -> tuple[Any, int | None]:
    """Returns the order that one process evaluates and its batch size, None for items that go to the ranks as they are.

    Args:
        loader: the user's.
        batch_sampler: its own, or what stands for it.

    Raises:
        TypeError: nobody knows how much it is.
    """
    order: Any = batch_sampler if is_own(batch_sampler) else getattr(batch_sampler, "sampler", loader.sampler)
    check_length(order)
    is_cut = batch_sampler is not None and not is_own(batch_sampler)
    return order, batch_sampler.batch_size if is_cut else None
