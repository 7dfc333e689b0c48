"""`LengthBucketing`: batches of samples of like length, each of at most so many tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..flags import check_count
from ..seeds import mixed

__all__ = ["LengthBucketing"]


class LengthBucketing(Sampler[list[int]]):
    """A batch sampler: samples of like length together, as many as a budget of tokens holds.

    A batch takes ``max_tokens // longest`` samples, so padded to its longest sample it has at most `max_tokens` tokens.
    In each epoch, samples of equal length change places and the batches come in another order. That order is of groups
    of `group` batches of neighbouring lengths; several ranks are dealt neighbours, so the batches of a step cost about
    the same. The number of batches is the same in every epoch.

    Args:
        lengths: tokens of each sample of the data set, [num_samples], at least 1.
        max_tokens: tokens of a padded batch at most.
        shuffle: draw another order in each epoch; without it, the longest come first, in the order of the data set.
        seed: of all orders; the epoch is mixed in. Random numbers from elsewhere are neither used nor drawn.
        drop_last: leave out the batch of the shortest samples, if it could hold more.
        group: batches of neighbouring lengths that follow one another; best a multiple of the number of ranks.

    Raises:
        ValueError: `max_tokens` or `group` is no positive number, or a length is less than 1 or more than `max_tokens`.
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
        """Itself: of a batch sampler, Lightning sets the epoch of what it finds by this name."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        order = self._order(generator)
        for index in self._batches(generator):
            yield order[self._ends[index - 1] if index else 0 : self._ends[index]].tolist()

    def _order(self, generator: torch.Generator) -> Tensor:
        """All samples, the longest first; of equal ones, those first that the epoch draws first."""
        if not self.shuffle:
            return self.lengths.argsort(descending=True, stable=True)
        drawn = torch.randperm(len(self.lengths), generator=generator)
        return drawn[self.lengths[drawn].argsort(descending=True, stable=True)]

    def _batches(self, generator: torch.Generator) -> list[int]:
        """Indices of the batches, as they come; the group that is not full is the last, so that all others align."""
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
