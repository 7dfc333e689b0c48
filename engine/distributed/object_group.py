"""Object collectives: collectives of plain values between the hosts, in which accelerators take no part."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SELF", "WORLD", "ObjectGroup", "gather_otherwise", "num_ranks"]

_made: list[Any] = [None, None]
"""The default process group, and the gloo group that was made beside it."""
_otherwise: list[Callable[[Any], list[Any]]] = []
"""Takes the place of the collectives of all ranks; empty: they are torch's."""


def gather_otherwise(function: Callable[[Any], list[Any]] | None) -> None:
    """Has a function do what `all_gather_object` does for all ranks, and all other collectives of them by it.

    Args:
        function: returns the values of all ranks, in rank order, on every rank; None for torch's collectives.
    """
    _otherwise[:] = [] if function is None else [function]


def num_ranks() -> int:
    """Returns the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _world_group() -> Any:
    """Returns a gloo group of all ranks, for use by their main threads."""
    default = dist.group.WORLD
    if dist.get_backend(default) == "gloo":
        return default
    if _made[0] is not default:
        _made[:] = default, dist.new_group(backend="gloo")
    return _made[1]


class ObjectGroup:
    """A group of ranks with collectives of plain values; all ranks call the same methods, in the same order.

    Args:
        group: a gloo group; None for all ranks that are connected.
        is_alone: the group is this rank alone.
    """

    def __init__(self, group: Any = None, *, is_alone: bool = False) -> None:
        self._group = group
        self._is_alone = is_alone

    @property
    def process_group(self) -> Any:
        """The gloo group, for collectives of torch; None for a single rank."""
        return None if self.size == 1 else self._group or _world_group()

    @property
    def size(self) -> int:
        """Number of ranks."""
        if self._is_alone:
            return 1
        return num_ranks() if self._group is None else dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""
        return 0 if self.size == 1 else dist.get_rank(self._group)

    @property
    def is_otherwise(self) -> bool:
        """Whether its collectives are not torch's, see `gather_otherwise`."""
        return bool(_otherwise) and self._group is None and self.size > 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order, on every rank; the values are pickled."""
        if self.is_otherwise:
            return _otherwise[0](value)
        values = [value] * self.size
        if len(values) > 1:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order, on the first rank; other ranks must not use the result."""
        if self.is_otherwise:
            return self.all_gather_object(value)
        values = [value] * self.size
        if len(values) > 1:
            dist.gather_object(value, values if self.rank == 0 else None, group=self.process_group, group_dst=0)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Returns the first rank's value on every rank."""
        if self.is_otherwise:
            return self.all_gather_object(value)[0]
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.process_group, group_src=0)
        return values[0]

    def call_on_first(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on the first rank, and returns its result, or raises its error, on all ranks."""
        result: Any = None
        error: Exception | None = None
        is_called = False
        while not is_called:  # again if the first rank was lost meanwhile, and another one has its number now
            is_called = self.rank == 0
            if is_called:
                try:
                    result = function()
                except Exception as raised:
                    error = raised
            is_called, result, error = self.broadcast_object((is_called, result, error))
        if error is not None:
            raise error
        return result

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns the numbers of all ranks, in rank order, on every rank; one all-reduce of 8 bytes a rank."""
        if self.is_otherwise:
            return self.all_gather_object(value)
        values = torch.zeros(self.size, dtype=torch.int64)
        if len(values) == 1:
            return [value]
        values[self.rank] = value
        dist.all_reduce(values, group=self.process_group)
        return values.tolist()

    def all_gather_bools(self, value: bool) -> list[bool]:
        """Returns the flags of all ranks, in rank order, on every rank; communicates as `all_gather_ints`."""
        return [bool(flag) for flag in self.all_gather_ints(value)]


WORLD = ObjectGroup()
SELF = ObjectGroup(is_alone=True)
