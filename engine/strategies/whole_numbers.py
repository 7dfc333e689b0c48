"""`float(p.norm())` and `p.sum().item()` of a sharded parameter give the number of the whole, not of this rank's shard.

DTensor's `item` hands out what a rank has: of a norm or sum that still is to be reduced, that of its own shard. So an
optimizer that reads it (LARS, LAMB) would scale each shard of a parameter in another way. Each such number is one
all-reduce of 4 bytes here, which all ranks make.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .unit_order import READ, UnitOrder

__all__ = ["give_back_numbers", "read_whole_numbers"]

_ITEM = torch.ops.aten._local_scalar_dense.default


def read_whole_numbers(order: UnitOrder | None) -> None:
    """Has `item` of a DTensor reduce it first, until `give_back_numbers`.

    Args:
        order: by which it is checked that all ranks do so; None where that is not known.
    """

    def item(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
        (tensor,) = args
        if all(placement.is_replicate() for placement in tensor.placements):
            return tensor.to_local().item()
        if order is not None:
            order.check(READ)
        with torch.no_grad():
            return tensor.full_tensor().item()

    _handlers()[_ITEM] = item


def give_back_numbers() -> None:
    """Puts torch's `item` back."""
    _handlers().pop(_ITEM, None)


def _handlers() -> dict[Any, Callable[..., Any]]:
    return DTensor._op_dispatcher._custom_op_handlers  # torch: OpDispatcher._custom_op_handlers
