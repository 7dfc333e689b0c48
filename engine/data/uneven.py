"""Training loaders with different numbers of batches on the ranks (streams, users' samplers).

Before each batch the ranks gather the numbers of samples in their batches, or that they have no batch left: one
all-reduce of one number per rank, between hosts. So all ranks know the weight of each batch, and no rank waits for one
that has finished its data.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size, sized_len
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, default_collate

from ..flags import UnevenPolicy
from .epoch_position import order_of
from .even_batches import even_batches_of
from .global_order import SHARE_EVENLY, GlobalBatches, GlobalOrder, Samples, not_beside_others
from .samples import num_samples
from .shards import ShardedLoader, padding_batch
from .stateful import StateTrackingLoader
from .streams import UnevenEvalLoader

__all__ = [
    "UnevenTrainLoader",
    "check_evaluated_side_by_side",
    "check_trained_side_by_side",
]

_NOTHING = object()
_NONE_LEFT, _UNSEEN = -1, -2
"""Gathered in place of a number of samples: no batch is left; or the number is unknown."""
_NUM_KEPT = 4
"""The number of latest batches whose sizes are kept: the current one, and some that are fetched ahead."""

log = logging.getLogger("polyphase.engine")


class UnevenTrainLoader(DataLoader):
    """A training loader that ends each epoch at the same batch as those of the other ranks; made by `clone_loader`."""

    policy: UnevenPolicy
    """``"pad"``: an epoch ends with the last rank; the others run their last batch again, which counts for nothing.
    ``"drop"``: it ends with the first rank; the remaining batches of the others are not trained on."""
    rank: int
    all_gather_ints: Callable[[int], list[int]]
    """Takes this rank's number and returns those of all ranks, in rank order; all ranks call it together."""
    num_done: Callable[[], int]
    """Returns the number of batches of the epoch that were done before this pass."""
    lengths: list[Any]
    """Number of batches by rank; None for a rank that does not know its own."""
    name_beside_others: str | None = None
    """The name of the loader in messages, if it is read side by side with others: one loss is then for all of them."""
    _sizes: dict[int, list[int]]

    def samples(self, index: int) -> Samples:
        """Returns the number of samples in a batch of the epoch, on this rank and on all ranks.

        Raises:
            ValueError: a rank does not know the number of samples in its batch.
        """
        sizes = self._sizes[index]
        if _UNSEEN in sizes:
            where = [rank for rank, size in enumerate(sizes) if size == _UNSEEN]
            raise ValueError(
                f"The number of samples in a batch of rank(s) {where} is unknown: the batch has no tensor whose first"
                " dimension is that number, and no strings from torch's own `collate_fn`. Return"
                ' {"loss": loss, "weight": number} from `training_step`.'
            )
        return Samples(max(0, sizes[self.rank]), sum(size for size in sizes if size > 0))

    def is_through(self, index: int) -> bool:
        """Whether this rank has no batch left at batch `index` of the epoch."""
        return self._sizes[index][self.rank] == _NONE_LEFT

    def leaves_out_ranks(self, index: int) -> bool:
        """Whether some rank has no batch left at batch `index` of the epoch."""
        return _NONE_LEFT in self._sizes[index]

    def __len__(self) -> int:
        if None in self.lengths:
            raise TypeError(f"{type(self).__name__} has no length on every rank")
        return (min if self.policy == "drop" else max)(self.lengths)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._sizes = {}
        return self._together(super().__iter__(), self.num_done())

    def _together(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        first, latest = index, _NOTHING
        while True:
            batch = next(batches, _NOTHING)
            sizes = self.all_gather_ints(_NONE_LEFT if batch is _NOTHING else self._size_of(batch))
            if max(sizes) == _NONE_LEFT == min(sizes) or (self.policy == "drop" and _NONE_LEFT in sizes):
                self._report(index, sizes)
                return
            if self.name_beside_others is not None and len(set(sizes)) > 1:
                num_samples = [max(0, size) for size in sizes]
                problem = f"has {num_samples} samples for batch {index}"
                raise not_beside_others(self.name_beside_others, problem, SHARE_EVENLY)
            # The rest of a resumed epoch may be less than a batch for each rank.
            is_rest = isinstance(self, ShardedLoader) and self.dataset.dealt is not None
            if batch is latest is _NOTHING and is_rest:
                latest = padding_batch(self)
            if _NONE_LEFT in sizes and index == first and not is_rest:
                where = [rank for rank, size in enumerate(sizes) if size == _NONE_LEFT]
                raise ValueError(
                    f"rank(s) {where} of {len(sizes)} have no batch at all of {type(self.dataset).__name__}, and need"
                    " one to take part in training with: give each rank some of it, use fewer ranks, or uneven='drop'."
                    if first == 0
                    else f"The checkpoint was saved when rank(s) {where} had finished their data, and others had"
                    " not: training can't resume there. Resume at the end of an epoch, or load only the weights."
                )
            if batch is not _NOTHING:
                latest = batch
            elif isinstance(self, StateTrackingLoader):
                self.repeat()
            self._sizes[index] = sizes
            self._sizes.pop(index - _NUM_KEPT, None)
            index += 1
            yield latest

    def _size_of(self, batch: Any) -> int:
        size = num_samples(batch)
        try:
            return extract_batch_size(batch) if size is None else size
        except MisconfigurationException:
            sizes = set(_numbers_of_strings(batch)) if self.collate_fn is default_collate else set()
            return sizes.pop() if len(sizes) == 1 else _UNSEEN

    def _report(self, num_batches: int, sizes: list[int]) -> None:
        more = [rank for rank, size in enumerate(sizes) if size != _NONE_LEFT]
        if more and self.rank == 0:
            log.warning("uneven='drop': the epoch ends after %d batches; rank(s) %s have more", num_batches, more)


def _numbers_of_strings(batch: Any) -> Iterator[int]:
    """Yields the lengths of the lists of strings in a batch collated by torch: such a list has a string per sample."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, (list, tuple)):
        return
    if parts and parts is batch and all(isinstance(item, (str, bytes)) for item in parts):
        yield len(parts)
        return
    for item in parts:
        yield from _numbers_of_strings(item)


# Refuses loaders that several ranks read side by side (a `CombinedLoader`) with uneven shares.
#
# A step then has one loss, computed from one batch of each loader. The ranks' losses are averaged. A weight applies to
# the whole loss, not to the part of one loader. Suppose that two ranks have different numbers of samples of one loader,
# and equal numbers of another one: then some samples would count for more than in one process. So in each step all
# ranks need the same number of samples of each loader. (The losses of a single loader, and of evaluation loaders that
# are read one after the other, are weighted by their numbers of samples.)


def check_trained_side_by_side(combined: CombinedLoader, num_ranks: int) -> None:
    """Checks that the ranks have equal shares of each training loader, in all steps of the epoch.

    Lengths of streams and sizes of a batch sampler's batches are unknown before they are read: the loaders check them
    while they are read.

    Args:
        combined: the prepared loaders, with their limits.
        num_ranks: number of ranks with different samples.

    Raises:
        ValueError: the last step of a loader can't be shared evenly.
    """
    loaders = combined.flattened
    if num_ranks == 1 or len(loaders) == 1:
        return
    # Lightning: CombinedLoader's mode.
    num_steps, cycles = _num_steps(combined), combined._mode == "max_size_cycle"
    for number, loader in enumerate(loaders):
        if not isinstance(loader, DataLoader):
            continue
        name = f"Training loader {number + 1} of {len(loaders)}, over a {type(loader.dataset).__name__},"
        if isinstance(loader, UnevenTrainLoader):
            loader.name_beside_others = name
            lengths, is_known = loader.lengths, None not in loader.lengths and loader.policy != "drop"
            if is_known and min(lengths) < min(max(lengths), num_steps):
                raise not_beside_others(name, f"has {lengths} batches on the ranks", SHARE_EVENLY)
            continue
        order = order_of(loader)
        if order is None or order.num_replicas != num_ranks:
            continue
        if loader.batch_sampler is order:  # of the user's own batches, whose sizes are known when they are drawn
            order.name_beside_others, order.num_even_batches = name, num_steps
        length = len(loader)
        left = [len(order.sampler) - order.start] if num_steps >= length else []  # type: ignore[arg-type]
        left += [len(order.sampler)] if cycles and num_steps > length else []  # type: ignore[arg-type]
        for num_left in left:
            _check_last_step(loader, order, num_left, num_ranks, name)


def _check_last_step(loader: DataLoader, order: GlobalOrder, num_left: int, num_ranks: int, name: str) -> None:
    """Checks that the ranks have equal shares of the last step of a pass over `num_left` items of an order.

    Raises:
        ValueError: the shares differ.
    """
    if order.drop_last or num_left % num_ranks == 0:
        return
    batches = loader.batch_sampler
    window, unit = (batches.size, "samples") if isinstance(batches, GlobalBatches) else (num_ranks, "batches")
    remedy = f"Give it drop_last=True, or a number of {unit} that {num_ranks} divides"
    if order.start:
        remedy = "Resume with the former number of ranks, or at the end of an epoch, or load only the weights"
    raise not_beside_others(name, f"has {num_left % window} {unit} for its last step", remedy)


def _num_steps(combined: CombinedLoader) -> float:
    """Returns the number of steps of an epoch; infinite if it is unknown."""
    limits = combined.limits or [float("inf")] * len(combined.flattened)
    lengths = [float("inf") if (length := sized_len(loader)) is None else length for loader in combined.flattened]
    read = [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]
    return min(read) if combined._mode == "min_size" else max(read)


def check_evaluated_side_by_side(combined: CombinedLoader) -> None:
    """Checks that no rank has to evaluate another rank's sample to fill up its part of a batch of several loaders.

    For streams, whose lengths are unknown, it only warns.

    Args:
        combined: the prepared loaders, which are read side by side, with their limits.

    Raises:
        ValueError: the last batch of a loader has fewer samples than there are ranks, and the loaders differ in this.
    """
    loaders = combined.flattened
    if len(loaders) > 1 and any(isinstance(loader, UnevenEvalLoader) for loader in loaders):
        rank_zero_warn(
            "Streams are evaluated side by side with other loaders: a rank that has finished one of them repeats its"
            " last batch, so that these samples may count twice. Read the loaders one after the other (a list of"
            " loaders, or CombinedLoader's mode 'sequential') for exact figures."
        )
    evens = [batches for loader in loaders if (batches := even_batches_of(loader)) is not None]
    # If the loaders are alike, all parts of the last batch are padding on the same ranks, which then evaluate nothing.
    are_alike = len(evens) == len(loaders) and len({(len(batches), batches.num_real) for batches in evens}) == 1
    num_steps = _num_steps(combined)
    for batches in evens:
        if batches.has_padding and len(batches) <= num_steps and not are_alike:
            raise ValueError(
                f"One of {len(loaders)} loaders that are evaluated side by side has fewer samples for its last batch"
                f" than the {batches.num_replicas} ranks: some would be evaluated twice. Give it another batch size,"
                " or a number of samples that the ranks can share, or read the loaders one after the other (a list"
                " of loaders, or CombinedLoader's mode 'sequential')."
            )
