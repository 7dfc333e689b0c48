"""Ranks with different numbers of batches of their own end an epoch together: streams, and samplers of the user's own.

Before each batch the ranks say how many samples theirs has, or that they have none left, by one number from host to
host. So they know what each batch counts for, and nobody waits for a rank that is through.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, default_collate

from .copied import copied
from .global_order import Samples
from .shards import InShards, filler
from .stateful import Remembering

__all__ = ["UNEVEN", "Together", "together"]

UNEVEN = {
    "pad": "until the last rank is through; the others run their last batch again, which counts for nothing",
    "join": "until the last rank is through; the others take part in its collectives and run nothing (ddp only)",
    "drop": "until the first rank is through; what the others have left is not trained on",
}
"""Descriptions of the end of an epoch, by policy."""

_NOTHING = object()
_NONE_LEFT, _UNSEEN = -1, -2
"""Values that stand in place of a number of samples."""
_NUM_KEPT = 4
"""Batches whose sizes are asked for at most: the present one, and some that are fetched ahead."""

log = logging.getLogger("polyphase.engine")


class Together(DataLoader):
    """A training loader that ends an epoch together with those of the other ranks."""

    policy: Literal["pad", "join", "drop"]
    rank: int
    say: Callable[[int], list[int]]
    """Gathers a number of each rank: takes this rank's and returns all, in rank order; all ranks call it together."""
    length: int | None
    """Number of batches, if all ranks know theirs."""
    num_done: Callable[[], int]
    """Batches of the epoch that were done before the pass that begins."""
    _sizes: dict[int, list[int]]

    def samples(self, index: int) -> Samples:
        """Returns the number of samples in a batch of the epoch, on this rank and on all together.

        Raises:
            ValueError: a rank can't see how many samples its own has.
        """
        sizes = self._sizes[index]
        if _UNSEEN in sizes:
            where = [rank for rank, size in enumerate(sizes) if size == _UNSEEN]
            raise ValueError(
                f"How many samples a batch of rank(s) {where} has can't be seen: there is no tensor in it whose first"
                " dimension would say so, nor strings of torch's own `collate_fn`. Return"
                ' {"loss": loss, "weight": number} from `training_step`.'
            )
        return Samples(max(0, sizes[self.rank]), sum(size for size in sizes if size > 0))

    def is_through(self, index: int) -> bool:
        """Whether this rank has none left at that batch of the epoch."""
        return self._sizes[index][self.rank] == _NONE_LEFT

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{type(self).__name__} has no length on every rank")
        return self.length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._sizes = {}
        return self._together(super().__iter__(), self.num_done())

    def _together(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        first, latest = index, _NOTHING
        while True:
            batch = next(batches, _NOTHING)
            sizes = self.say(_NONE_LEFT if batch is _NOTHING else self._size_of(batch))
            if max(sizes) == _NONE_LEFT == min(sizes) or (self.policy == "drop" and _NONE_LEFT in sizes):
                self._report(index, sizes)
                return
            # What is left of a resumed epoch may be less than a batch for each rank.
            goes_on = isinstance(self, InShards) and self.dataset.dealt is not None
            if batch is latest is _NOTHING and goes_on:
                latest = filler(self)
            if _NONE_LEFT in sizes and index == first and not goes_on:
                where = [rank for rank, size in enumerate(sizes) if size == _NONE_LEFT]
                raise ValueError(
                    f"rank(s) {where} of {len(sizes)} have no batch at all of {type(self.dataset).__name__}, and need"
                    " one to take part in training with: give each rank some of it, use fewer ranks, or uneven='drop'."
                    if first == 0
                    else f"The checkpoint was saved when rank(s) {where} were through with their data, and others were"
                    " not: it can't be gone on with there. Resume at the end of an epoch, or load the weights alone."
                )
            if batch is not _NOTHING:
                latest = batch
            elif isinstance(self, Remembering):
                self.repeat()
            self._sizes[index] = sizes
            self._sizes.pop(index - _NUM_KEPT, None)
            index += 1
            yield latest

    def _size_of(self, batch: Any) -> int:
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:
            sizes = set(_numbers_of_strings(batch)) if self.collate_fn is default_collate else set()
            return sizes.pop() if len(sizes) == 1 else _UNSEEN

    def _report(self, num_batches: int, sizes: list[int]) -> None:
        more = [rank for rank, size in enumerate(sizes) if size != _NONE_LEFT]
        if more and self.rank == 0:
            log.warning("uneven='drop': the epoch ends after %d batches; rank(s) %s have more", num_batches, more)


def together(
    loader: DataLoader,
    policy: str,
    lengths: list[int | None],
    rank: int,
    say: Callable[[int], list[int]],
    num_done: Callable[[], int],
) -> Together:
    """A copy of a training loader, of a subclass of its class, that ends together with those of the other ranks.

    Args:
        loader: this rank's.
        policy: one of `UNEVEN`.
        lengths: numbers of batches by rank, where they are known.
        rank: this one.
        say: see `Together`.
        num_done: see `Together`.
    """
    known = [length for length in lengths if length is not None]
    length = (min if policy == "drop" else max)(known) if len(known) == len(lengths) else None
    return copied(loader, Together, policy=policy, rank=rank, say=say, num_done=num_done, length=length)


def _numbers_of_strings(batch: Any) -> Iterator[int]:
    """Lengths of the lists of strings in a batch that torch has collated: a list has those of all samples."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, (list, tuple)):
        return
    if parts and parts is batch and all(isinstance(part, (str, bytes)) for part in parts):
        yield len(parts)
        return
    for part in parts:
        yield from _numbers_of_strings(part)
