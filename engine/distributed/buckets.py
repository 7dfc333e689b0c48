"""Buckets, tensors that are sent together as one flat tensor; and with them weights and buffers equal on all ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

# Lightning: sets `self.device` of modules without moving them.
from .._compat.lightning import _update_properties
from ..attachments import swap

__all__ = [
    "copy",
    "equalise",
    "flatten",
    "give_value",
    "in_buckets",
    "local_part",
    "move_module",
    "share_buffers",
    "tell_device",
    "unflatten",
    "unsharded_tensors",
]


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor that may be split over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_buckets(tensors: Iterable[Tensor], largest_mb: float) -> Iterator[list[Tensor]]:
    """Yields buckets: tensors of one dtype, in their order, of at most `largest_mb` MiB, or a single larger tensor."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for of_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in of_dtype:
            if bucket and num_bytes + tensor.nbytes > largest_mb * 2**20:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        yield bucket


def flatten(tensors: list[Tensor]) -> Tensor:
    """Returns a copy of `tensors` as one 1-d tensor, each flattened, in their order."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Returns views of `flat` in the shapes of `tensors`; the inverse of `flatten`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [view.view(tensor.shape) for view, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def copy(values: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies `values` into `tensors`, which may be parameters."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


_BUCKET_MB = 1
"""Smaller tensors are broadcast together: a collective for each takes longer than their bytes."""


def unsharded_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers of modules that are not sharded, each once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return [tensor for tensor in dict.fromkeys(tensors) if not isinstance(tensor, DTensor)]


def equalise(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves parameters and buffers that are not sharded to `device`, and broadcasts rank 0's values."""
    # Those on the meta device are read by all ranks from the same files.
    whole = [tensor for tensor in unsharded_tensors(modules) if not tensor.is_meta]
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
