"""Gradients that travel together, wherever they come from: a bucket of DDP, or the shards of a unit under hsdp."""

import dataclasses
import math
from typing import NamedTuple

from torch import Tensor

__all__ = ["Bucket", "Member"]


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


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters as one flat tensor."""

    index: int
    gradients: Tensor
    """[numel], one member behind the other; to be replaced by the average over the ranks."""
    members: tuple[Member, ...]

    @property
    def numels(self) -> list[int]:
        """Number of values of each member."""
        return [member.numel for member in self.members]
