"""A part whose forward does not go with the plan: its weights stay split, and every rank computes all of it.

The weights are gathered for its forward, and again where that is done again in the backward pass. Ranks have the same
inputs and compute the same, so that each has all of their gradient and takes its own part of it: nothing is sent.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# torch: has a module use other tensors as its parameters; `functional_call` would run the hooks of the module as well.
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from .styles import FusedColwise, Region, entering, to_plain

__all__ = ["compute_whole", "hooks_of"]


def hooks_of(module: nn.Module) -> set[int]:
    """The keys of the hooks around the forward of `module` itself."""
    return {*module._forward_pre_hooks, *module._forward_hooks}  # torch: Module._forward_hooks


def compute_whole(region: nn.Module, style: Region, applied: Mapping[nn.Module, tuple[Any, Collection[int]]]) -> None:
    """Has every rank compute all of `region`, to which `style` was applied.

    Args:
        region: a part of the model.
        style: which it was split by.
        applied: the style of each split sub-module, and the keys of the hooks that it has registered.
    """
    for part in region.modules():
        if part is region or part not in applied:
            continue
        of_part, keys = applied[part]
        for key in keys:
            part._forward_pre_hooks.pop(key, None)
            part._forward_hooks.pop(key, None)
        if isinstance(of_part, FusedColwise):
            del part.forward
    style.instead = functools.partial(_forward, region)


def _forward(region: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    parameters = dict(region.named_parameters())
    mesh = next(p.device_mesh for p in parameters.values() if isinstance(p, DTensor))
    with _reparametrize_module(region, to_plain(parameters)):
        result = forward(*to_plain(args), **to_plain(kwargs))
    return tree_map_only(Tensor, lambda tensor: entering(tensor, mesh), result)
