"""`float(p.norm())` and `p.sum().item()` of a sharded parameter give the number of the whole, not of this rank's shard.

DTensor's `item` returns the local value: of a norm or sum that is not reduced yet, the value of the rank's own shard.
So an optimizer that reads it (LARS, LAMB) would scale each shard of a parameter differently. Here each such number is
one all-reduce of 4 bytes on all ranks.

Each number that Lightning's `grad_norm` returns is such a number, too. The function stacks DTensors, which torch can't
do. Users import it before a run, so its code object is replaced during a run.
"""

from typing import Any

import torch
from lightning.pytorch.utilities.grads import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.torch import DTensorSpec, tree_leaves
from .unit_order import READ, UnitOrder

__all__ = ["give_back_numbers", "gradient_norms", "read_whole_numbers"]

_ITEM = torch.ops.aten._local_scalar_dense.default
_dispatcher: Any = DTensor._op_dispatcher  # torch: DTensor._op_dispatcher


def read_whole_numbers(order: UnitOrder | None) -> None:
    """Makes `item` of a DTensor reduce it first, and checks torch's own reductions, until `give_back_numbers`.

    Args:
        order: checks that all ranks make these reductions in the same order; None: no check.
    """

    def item(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
        (tensor,) = args
        if all(placement.is_replicate() for placement in tensor.placements):
            return tensor.to_local().item()
        if order is not None:
            order.check(READ)
        with torch.no_grad():
            return tensor.full_tensor().item()

    def redistribute(operation: Any, arguments: Any, *args: Any) -> None:
        if order is not None and _communicates(operation, arguments):
            order.check(READ)
        type(_dispatcher).redistribute_local_args(operation, arguments, *args)

    _dispatcher._custom_op_handlers[_ITEM] = item  # torch: OpDispatcher._custom_op_handlers
    vars(_dispatcher)["redistribute_local_args"] = redistribute  # torch: OpDispatcher.redistribute_local_args
    grad_norm.__code__ = _grad_norm.__code__


def _communicates(operation: Any, arguments: Any) -> bool:
    """Whether an argument gets another placement; False if torch only asks for another size (`new_empty`)."""
    is_flat = operation.args_tree_spec is None  # torch: OpInfo.args_tree_spec, OpSchema.args_schema
    placed = arguments.args_schema if is_flat else tree_leaves(arguments.args_schema)
    return any(
        isinstance(spec, DTensorSpec) and spec.placements != placed[index].placements
        for index, spec in enumerate(operation.flat_args_schema)  # torch: OpInfo.flat_args_schema
    )


def give_back_numbers() -> None:
    """Restores torch's functions."""
    _dispatcher._custom_op_handlers.pop(_ITEM, None)
    vars(_dispatcher).pop("redistribute_local_args", None)
    grad_norm.__code__ = _LIGHTNINGS


_LIGHTNINGS = grad_norm.__code__


def _grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    import sys  # this code runs with the globals of Lightning's module

    this_module = sys.modules["polyphase.engine.strategies.fsdp.whole_numbers"]
    return this_module.gradient_norms(module, float(norm_type), group_separator)


def gradient_norms(module: nn.Module, norm_type: float, separator: str) -> dict[str, Tensor]:
    """Returns the result of Lightning's `grad_norm`: the norm of each gradient, and of all together."""
    if norm_type <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = parameter.grad.detach().norm(norm_type)
            norms[f"grad_{norm_type}_norm{separator}{name}"] = torch.tensor(float(norm), device=norm.device)
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.tensor(list(norms.values())).norm(norm_type)
    return norms
