"""Gradients that are sent together: a bucket of DDP, or the shards of a unit under hsdp."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bucket", "ParamSlice", "accumulation_dtype"]

_SHORT = 2**16
"""Vectors with more values are compressed like matrices, since they may be most of a model."""


class ParamSlice(NamedTuple):
    """A parameter, or this rank's shard of one."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows (the first dim) and columns (the product of all other dims)."""
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // max(rows, 1)

    @property
    def is_short_vector(self) -> bool:
        """Whether the parameter is a bias or the gains of a norm: few values, each of them important."""
        return len(self.shape) < 2 and self.numel <= _SHORT


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters as one flat tensor."""

    index: int
    gradients: Tensor
    """[numel], the members one after the other; replaced by the average over the ranks."""
    members: tuple[ParamSlice, ...]

    def cut(self, least_numel: int) -> "Iterator[tuple[slice, Bucket]]":
        """Splits the bucket into runs of members with at least `least_numel` values each; the last may have fewer.

        Yields each run with its position in the bucket.
        """
        start = numel = 0
        run: list[ParamSlice] = []
        for position, member in enumerate(self.members, start=1):
            run.append(member)
            numel += member.numel
            if numel >= least_numel or position == len(self.members):
                span = slice(start, start + numel)
                yield span, Bucket(self.index, self.gradients[span], tuple(run))
                start, numel, run = start + numel, 0, []

    @property
    def numels(self) -> list[int]:
        """The number of values of each member."""
        return [member.numel for member in self.members]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums of tensors of `dtype`: at least fp32, since a sum may exceed the range of 16 bit."""
    return torch.promote_types(dtype, torch.float32)
