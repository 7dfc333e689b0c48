"""Gradients of gradients under FSDP2, which frees gathered parameters after the first backward.

FSDP2 reduces a unit's gradients when backward reaches the unit's inputs. In a second backward these inputs may have no
gradient at all. Then autograd reaches them at once, on the host's thread, while an accelerator's thread still computes
the unit's gradients. Gradients that are ready later would be lost, or mixed with those of the next step. So all
reductions of such a step wait for the end of its backward.
"""

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
        self._is_over = False
        """Whether a backward has computed all gradients."""
        for unit in model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            # torch: FSDPState._pre_backward is called when the gradient of an output of the unit is known, and
            # _root_post_backward_final_callback at the end of a backward. An earlier run may have replaced them.
            state: Any = unit._get_fsdp_state()
            if unit is not model:  # the root is gathered for the whole step
                pre_backward = functools.partial(type(state)._pre_backward, state)
                state._pre_backward = functools.partial(self._before, unit, pre_backward)
            end = functools.partial(type(state)._root_post_backward_final_callback, state)
            state._root_post_backward_final_callback = functools.partial(self._end, end)
            for group in state._fsdp_param_groups:  # torch: FSDPState._fsdp_param_groups, FSDPParamGroup.post_backward
                group.post_backward = _Deferred(self, group.post_backward)

    def _before(self, unit: FSDPModule, pre_backward: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled() and unit not in self._kept:  # autograd: enabled while a graph is created
            self._kept.append(unit)
            unit.set_reshard_after_backward(False, recurse=False)
        return pre_backward(gradient)

    def _end(self, end: Callable[[], None]) -> None:
        self._is_over = True
        try:
            end()  # reduces the gradients that were deferred
        finally:
            self._is_over = False

    @property
    def is_early(self) -> bool:
        """Whether backward may still have to compute some gradients of a unit."""
        return bool(self._kept) and not self._is_over

    def release(self) -> None:
        """Frees the units; called after the last backward of a step."""
        for unit in self._kept:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        self._kept.clear()


class _Deferred:
    """The reduction of a unit's gradients; a call does nothing while `SecondBackward.is_early`."""

    def __init__(self, owner: SecondBackward, reduction: Any) -> None:
        self._owner = owner
        self.reduction: Callable[..., None] = getattr(reduction, "reduction", reduction)  # an earlier run's, unwrapped

    def __call__(self, *unused: Any) -> None:
        if not self._owner.is_early:
            self.reduction(*unused)
