"""Gradients of gradients under FSDP2, which frees gathered parameters after the first backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["SecondBackward"]


class SecondBackward:
    """Keeps units gathered from a backward with ``create_graph=True`` until the backward through its graph ends.

    Args:
        model: with units sharded by `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[FSDPModule] = []
        for submodule in model.modules():
            if isinstance(submodule, FSDPModule) and submodule is not model:  # the root is gathered for the whole step
                # torch: FSDPState._pre_backward, called when the gradient of an output of the unit is known. An earlier
                # run may have replaced it.
                state: Any = submodule._get_fsdp_state()
                pre_backward = functools.partial(type(state)._pre_backward, state)
                state._pre_backward = functools.partial(self._before, submodule, pre_backward)

    def _before(self, unit: FSDPModule, pre_backward: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled() and unit not in self._kept:  # autograd: enabled while a graph is created
            self._kept.append(unit)
            unit.set_reshard_after_backward(False, recurse=False)
        return pre_backward(gradient)

    def release(self) -> None:
        """Frees the units; called after the last backward of a step."""
        for unit in self._kept:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        self._kept.clear()
