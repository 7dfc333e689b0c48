"""Broadcasts of rank 0's parameters and buffers to the other ranks, as in DDP, on each rank's device."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

# Lightning: sets `self.device` of modules without moving them.
from .._compat.lightning import _update_properties
from ..attachments import swap
from .buckets import copy, flatten, in_buckets, unflatten

__all__ = ["equalise", "give_value", "move_module", "share_buffers", "tell_device"]


_BUCKET_MB = 1
"""Smaller tensors are broadcast together: a collective for each takes longer than their bytes."""


def equalise(submodule: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers that are not sharded to `device`, and broadcasts rank 0's values."""
    whole = [tensor for tensor in (*submodule.parameters(), *submodule.buffers()) if not isinstance(tensor, DTensor)]
    whole = [tensor for tensor in whole if not tensor.is_meta]  # all ranks read these from the same files
    for tensor in whole:
        give_value(tensor, tensor.data.to(device))
    pending: list[tuple[list[Tensor], Tensor, Any]] = []
    for bucket in in_buckets(whole, _BUCKET_MB):
        flat = bucket[0].data if len(bucket) == 1 else flatten(bucket)
        pending.append((bucket, flat, dist.broadcast(flat, src=0, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        if len(bucket) > 1:
            copy(unflatten(flat, bucket), bucket)


def give_value(tensor: Tensor, value: Tensor) -> None:
    """Replaces the data of `tensor`, which stays the same object, by `value`, which may be on another device."""
    if torch._has_compatible_shallow_copy_type(tensor, value):  # torch: the condition in nn.Module.to
        tensor.data = value
    else:  # a device that an extension of torch provides
        # A new tensor in either case: a collective that has ended may still hold `value`.
        replacement = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach()
        swap(tensor, replacement)


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Sets `device` of `module` and its sub-modules, and moves metrics; parameters and buffers are moved before."""
    _update_properties(module, device=device)
    for submodule in module.modules():
        if isinstance(submodule, Metric):
            submodule.to(device)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Moves `module` as `module.to(device)` does, but keeps tied parameters tied on every kind of device."""
    for tensor in (*module.parameters(), *module.buffers()):
        give_value(tensor, tensor.data.to(device))
    tell_device(module, device)


def share_buffers(model: nn.Module | None) -> None:
    """Broadcasts rank 0's buffers (BatchNorm's statistics), so that all ranks evaluate with the same ones."""
    assert model is not None
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
