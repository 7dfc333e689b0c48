"""Gradients of gradients under FSDP2, which frees what it has gathered after the first backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["SecondBackward"]


class SecondBackward:
    """Keeps units gathered from a backward with ``create_graph=True`` to the end of the one through its graph.

    Args:
        model: whose units are sharded by `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[FSDPModule] = []
        for part in model.modules():
            if isinstance(part, FSDPModule) and part is not model:  # which is gathered for the whole step
                # torch: FSDPState._pre_backward, called as the gradient of an output of the unit is known. An earlier
                # run may have put its own in the place.
                state: Any = part._get_fsdp_state()
                pre_backward = functools.partial(type(state)._pre_backward, state)
                state._pre_backward = functools.partial(self._before, part, pre_backward)

    def _before(self, unit: FSDPModule, pre_backward: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled() and unit not in self._kept:  # autograd: it is where a graph is made
            self._kept.append(unit)
            unit.set_reshard_after_backward(False, recurse=False)
        return pre_backward(gradient)

    def release(self) -> None:
        """Frees the units; called after the last backward of a step."""
        for unit in self._kept:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        self._kept.clear()
