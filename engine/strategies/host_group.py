"""What the ranks tell each other in plain values, from host to host: no device takes part, or waits."""

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["flags", "gathered", "num_ranks", "numbers"]

_made: list[Any] = [None, None]
"""The default group, and the group beside it that was made for plain values."""


def num_ranks() -> int:
    """Number of processes that are connected; 1 where none are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _group() -> Any:
    """A gloo group of all ranks, for their main threads."""
    default = dist.group.WORLD
    if dist.get_backend(default) == "gloo":
        return default
    if _made[0] is not default:
        _made[:] = default, dist.new_group(backend="gloo")
    return _made[1]


def gathered(mine: Any) -> list[Any]:
    """What each rank gives, which pickle must be able to take, on all of them; all call it together."""
    everyones = [mine] * num_ranks()
    if len(everyones) > 1:
        dist.all_gather_object(everyones, mine, group=_group())
    return everyones


def numbers(mine: int) -> list[int]:
    """What each rank says, on all of them, by one all-reduce of a number per rank; all call it together."""
    said = torch.zeros(num_ranks(), dtype=torch.int64)
    if len(said) == 1:
        return [mine]
    said[dist.get_rank()] = mine
    dist.all_reduce(said, group=_group())
    return said.tolist()


def flags(mine: bool) -> list[bool]:
    """As `numbers`, of yes and no."""
    return [bool(flag) for flag in numbers(mine)]
