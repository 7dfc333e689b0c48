"""Batches for evaluation: each sample is on one rank, and all ranks have equally many batches.

The order of one process is cut into windows of W*b samples (W ranks, batches of b). In each window rank r has the r-th
contiguous slice; in the last, short window the slices differ by at most one sample. So the order by (window, rank) is
the order of the data set, and all ranks run each batch together, as the collectives of a forward pass need it.

    window 0             window 1       (W = 2, b = 3, 10 samples)
    0 1 2 | 3 4 5        6 7 | 8 9
    rank 0  rank 1       rank 0  rank 1
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from .clone_loader import classes_of_torchdata
from .global_order import GlobalOrder

__all__ = ["EvalBatchSampler", "check_length", "evaluated_order", "even_batches_of", "is_custom"]


class EvalBatchSampler(Sampler[Any]):
    """This rank's batches in evaluation.

    If the last window has fewer items than there are ranks, the ranks without one get a *padding batch*: an item of
    another rank, which they run for its collectives only. The first `num_real` batches are not padding.

    Args:
        order: the order of one process.
        batch_size: samples of a batch, b; None if each item of `order` is a batch: with a batch sampler of the user's
            own, or a loader without batches.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        drop_last: leave out the samples that one process with batches of b would leave out: fewer than b of them,
            for any number of ranks.
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
        self.sampler = order  # Lightning sets the epoch of the attribute with this name
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that begins next."""
        self.sampler.set_epoch(epoch)

    @property
    def size(self) -> int:
        """The number of items that all ranks together evaluate."""
        size = len(self.sampler)
        return size - size % (self.batch_size or 1) if self.drop_last else size

    @property
    def num_real(self) -> int:
        """Number of this rank's batches that are no padding; they come first."""
        return len(self) - (0 < self._size_of_last < self.num_replicas and self.rank >= self._size_of_last)

    @property
    def num_real_of_all(self) -> int:
        """Number of batches that no rank has padding for; they come first."""
        return len(self) - self.has_padding

    @property
    def has_padding(self) -> bool:
        """Whether some rank has a padding batch."""
        return 0 < self._size_of_last < self.num_replicas

    @property
    def leaves_some_idle(self) -> bool:
        """Whether some rank has a padding batch only."""
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
            batch = list(window[begin : begin + least + (self.rank < num_longer)] or window[-1:])
            yield batch[0] if self.batch_size is None else batch


def even_batches_of(loader: Any) -> EvalBatchSampler | None:
    """Returns the `EvalBatchSampler` of `loader`; None if it has none."""
    batches = getattr(loader, "batch_sampler", None)
    # Lightning: _IndexBatchSamplerWrapper, which notes the indices of a prediction, keeps the original by this name.
    for candidate in (batches, getattr(batches, "_batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(candidate, EvalBatchSampler):
            return candidate
    return None


def is_custom(batch_sampler: Any) -> bool:
    """Whether a batch sampler is of the user's own class: its batches stay as they are."""
    if batch_sampler is None or type(batch_sampler) is BatchSampler:
        return False
    return type(batch_sampler) not in classes_of_torchdata("sampler", "BatchSampler")


def check_length(order: Any) -> None:
    """Checks that a sampler or batch sampler can be shared by ranks.

    Raises:
        TypeError: it has no length.
    """
    try:
        len(order)
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"{type(order).__name__}, which gives the order of a DataLoader, has no __len__, which is needed to split"
            " it over the ranks. Give it one, or split its samples yourself with use_distributed_sampler=False."
        ) from None


def evaluated_order(loader: DataLoader, batch_sampler: Any) -> tuple[Any, int | None]:
    """Returns the order that one process evaluates, and its batch size; None for the latter if each item is a batch.

    Args:
        loader: the user's.
        batch_sampler: batch sampler of the loader, or one that replaces it.

    Raises:
        TypeError: the order has no length.
    """
    order: Any = batch_sampler if is_custom(batch_sampler) else getattr(batch_sampler, "sampler", loader.sampler)
    check_length(order)
    is_cut = batch_sampler is not None and not is_custom(batch_sampler)
    return order, batch_sampler.batch_size if is_cut else None
