"""Runs a region whose forward fails with DTensors: its weights stay split, and every rank computes all of it.

Communication: an all-gather of the weights in forward, and another one where the forward is recomputed in backward. The
ranks have the same inputs and compute the same, so each has the whole gradient and keeps its own part: nothing is sent.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# torch: runs a module with other tensors as its parameters; `functional_call` would run the module's hooks as well.
from ..._compat.torch import _reparametrize_module, tree_map_only
from ..contents import in_tuples
from ..counted_writes import begin_count, num_writes
from .styles import FusedColwise, ParallelRegion, to_plain, to_replica

__all__ = ["compute_replicated", "hooks_of"]


def hooks_of(module: nn.Module) -> set[int]:
    """Returns the keys of the forward hooks of `module` itself."""
    return {*module._forward_pre_hooks, *module._forward_hooks}  # torch: Module._forward_hooks


def compute_replicated(
    region: nn.Module, style: ParallelRegion, applied: Mapping[nn.Module, tuple[Any, Collection[int]]]
) -> None:
    """Makes every rank compute all of `region`: removes the hooks of its styles and gathers its weights in forward.

    Args:
        region: a sub-module of the model.
        style: the style that it was split by.
        applied: for each split sub-module its style, and the keys of the hooks that the style has registered.
    """
    for submodule in region.modules():
        if submodule is region or submodule not in applied:
            continue
        style_of_part, keys = applied[submodule]
        for key in keys:
            submodule._forward_pre_hooks.pop(key, None)
            submodule._forward_hooks.pop(key, None)
        if isinstance(style_of_part, FusedColwise):
            del submodule.forward
    style.replacement = functools.partial(_forward, region)


def _forward(region: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    parameters = dict(region.named_parameters())
    mesh = next(p.device_mesh for p in parameters.values() if isinstance(p, DTensor))
    wholes = to_plain(parameters)
    versions = {name: begin_count(whole) for name, whole in wholes.items()}
    with _reparametrize_module(region, wholes):
        result = forward(*in_tuples(to_plain, args), **{name: in_tuples(to_plain, arg) for name, arg in kwargs.items()})
    with torch.no_grad():  # all ranks have written the same
        for name, version in versions.items():
            if num_writes(wholes[name]) != version:
                parameter: Any = parameters[name]
                parameter.copy_(
                    distribute_tensor(wholes[name].detach(), mesh, parameter.placements, src_data_rank=None)
                )
    return tree_map_only(Tensor, lambda tensor: to_replica(tensor, mesh), result)
