"""Runs a region whose forward fails with DTensors: its weights stay split, and every rank computes all of it.

Communication: an all-gather of the weights in forward, and another one where the forward is recomputed in backward. The
ranks have the same inputs and compute the same, so each has the whole gradient and keeps its own part: nothing is sent.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# torch: runs a module with other tensors as its parameters; `functional_call` would run the module's hooks as well.
from ..._compat.torch import _reparametrize_module, tree_map_only
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
    with _reparametrize_module(region, to_plain(parameters)):
        result = forward(*to_plain(args), **to_plain(kwargs))
    return tree_map_only(Tensor, lambda tensor: to_replica(tensor, mesh), result)
