"""Gradients that travel together, wherever they come from: a bucket of DDP, or the shards of a unit under hsdp."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bucket", "Member", "wide"]

_SHORT = 2**16
"""Vectors of more values are compressed as matrices are: they may be all that a model has."""


class Member(NamedTuple):
    """A parameter, or this rank's shard of one."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns: the first dim, and all others together."""
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // max(rows, 1)

    @property
    def is_short_vector(self) -> bool:
        """A bias, or the gains of a norm: few values, on each of which much depends."""
        return len(self.shape) < 2 and self.numel <= _SHORT


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters as one flat tensor."""

    index: int
    gradients: Tensor
    """[numel], one member behind the other; to be replaced by the average over the ranks."""
    members: tuple[Member, ...]

    def cut(self, least_numel: int) -> "Iterator[tuple[slice, Bucket]]":
        """Runs of members of at least so many values together, the last one aside; and where in the bucket they are."""
        start = numel = 0
        run: list[Member] = []
        for position, member in enumerate(self.members, start=1):
            run.append(member)
            numel += member.numel
            if numel >= least_numel or position == len(self.members):
                place = slice(start, start + numel)
                yield place, Bucket(self.index, self.gradients[place], tuple(run))
                start, numel, run = start + numel, 0, []

    @property
    def numels(self) -> list[int]:
        """Number of values of each member."""
        return [member.numel for member in self.members]


def wide(dtype: torch.dtype) -> torch.dtype:
    """For sums, which may leave the range of 16 bit where no number does."""
    return torch.promote_types(dtype, torch.float32)
