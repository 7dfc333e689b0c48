"""Calls a function on rank 0 or on all ranks; if it raises on one rank, all ranks raise an error."""

from collections.abc import Callable
from typing import Any

from ..distributed.object_group import ObjectGroup
from .manifest import CheckpointError

__all__ = ["call_on_all", "call_on_rank_0"]


def call_on_all(group: ObjectGroup, function: Callable[[], Any]) -> Any:
    """Calls `function` on each rank; if it raises on one rank, all ranks raise a CheckpointError."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    for rank, message in enumerate(group.all_gather_object(None if error is None else repr(error))):
        if message is not None:
            raise CheckpointError(f"rank {rank} could not copy its tensors: {message}") from error
    return result


def call_on_rank_0(group: ObjectGroup, function: Callable[[], Any]) -> Any:
    """Calls `function` on rank 0 and returns its result on all ranks; if it raises, all ranks raise that error."""
    result: Any = None
    error: Exception | None = None
    if group.rank == 0:
        try:
            result = function()
        except Exception as raised:
            error = raised
    result, error = group.broadcast_object((result, error))
    if error is not None:
        raise error
    return result
