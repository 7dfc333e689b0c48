"""`LengthBucketing`: batches of samples with similar lengths, limited by a number of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..checkpoint.rng import derive_seed
from ..flags import check_count

__all__ = ["LengthBucketing"]


class LengthBucketing(Sampler[list[int]]):
    """A batch sampler that groups samples of similar length, up to a maximum number of tokens per batch.

    A batch has ``max_tokens // longest`` samples, so after padding to its longest sample it has at most `max_tokens`
    tokens. Each epoch shuffles samples of equal length, and the order of the batches. Batches are shuffled in groups of
    `group` batches with neighbouring lengths: several ranks get neighbours, so the batches of a step cost about the
    same. The number of batches is the same in every epoch.

    Args:
        lengths: number of tokens of each sample of the data set, [num_samples], at least 1.
        max_tokens: largest number of tokens of a padded batch.
        shuffle: draw a new order in each epoch; otherwise the longest samples come first, in the order of the data set.
        seed: seed of all orders, combined with the epoch. No other random generator is used or changed.
        drop_last: leave out the batch of the shortest samples if it is not full.
        group: number of batches with neighbouring lengths that stay together; best a multiple of the number of ranks.

    Raises:
        ValueError: `max_tokens` or `group` is not positive, or a length is less than 1 or more than `max_tokens`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        group: int = 8,
    ) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self.max_tokens = check_count("max_tokens", max_tokens)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.group = check_count("group", group)
        self.epoch = 0
        wrong = ((self.lengths < 1) | (self.lengths > max_tokens)).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"lengths[{wrong[0]}] = {int(self.lengths[wrong[0]])}, and so {len(wrong)} of {len(self.lengths)}:"
                f" a sample must have 1 to max_tokens={max_tokens} tokens. Leave out or cut these samples, or raise"
                " max_tokens."
            )
        self._ends = self._cut()

    @property
    def sampler(self) -> "LengthBucketing":
        """Returns itself: Lightning calls `set_epoch` on this attribute of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = self._order(generator)
        for index in self._batches(generator):
            yield order[self._ends[index - 1] if index else 0 : self._ends[index]].tolist()

    def _order(self, generator: torch.Generator) -> Tensor:
        """Returns all samples, longest first; samples of equal length are in the epoch's random order."""
        if not self.shuffle:
            return self.lengths.argsort(descending=True, stable=True)
        drawn = torch.randperm(len(self.lengths), generator=generator)
        return drawn[self.lengths[drawn].argsort(descending=True, stable=True)]

    def _batches(self, generator: torch.Generator) -> list[int]:
        """Returns the order of the batches; an incomplete group is the last, so that all other groups are aligned."""
        if not self.shuffle:
            return list(range(len(self)))
        groups: Any = torch.randperm(len(self) // self.group, generator=generator).tolist()
        indices = [group * self.group + i for group in groups for i in range(self.group)]
        return indices + list(range(len(indices), len(self)))

    def _cut(self) -> list[int]:
        """Returns the position after the last sample of each batch, among samples in descending order of length."""
        lengths, ends = self.lengths.sort(descending=True)[0], [0]
        while ends[-1] < len(lengths):
            ends.append(ends[-1] + self.max_tokens // int(lengths[ends[-1]]))
        if ends[-1] > len(lengths):
            ends[-1] = len(lengths)
            if self.drop_last:
                ends.pop()
        return ends[1:]
