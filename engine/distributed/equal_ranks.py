"""Gives all ranks the values that rank 0 has, as DDP does, on the ranks' own devices."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

# Lightning: sets `self.device` of modules without moving them.
from .._compat.lightning import _update_properties

__all__ = ["equalise", "give_value", "move_module", "share_buffers", "tell_device"]


def equalise(part: nn.Module, device: torch.device) -> None:
    """Moves what of `part` is not sharded yet to `device`, and gives every rank rank 0's values."""
    whole = [tensor for tensor in (*part.parameters(), *part.buffers()) if not isinstance(tensor, DTensor)]
    whole = [tensor for tensor in whole if not tensor.is_meta]  # what all ranks read from the same files
    for tensor in whole:
        give_value(tensor, tensor.data.to(device))
    pending = [dist.broadcast(tensor.data, src=0, async_op=True) for tensor in whole]
    for work in pending:
        work.wait()


def give_value(tensor: Tensor, value: Tensor) -> None:
    """Makes `tensor`, which stays the same object, hold `value`, which may be on another device."""
    if torch._has_compatible_shallow_copy_type(tensor, value):  # torch: what nn.Module.to asks
        tensor.data = value
    else:  # devices that torch knows as extensions
        # A new tensor in either case: a collective that has ended may still hold `value`.
        own = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach()
        torch.utils.swap_tensors(tensor, own)


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Updates the device that `module` notes, and moves its metrics; parameters and buffers are moved already."""
    _update_properties(module, device=device)
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)


def move_module(module: nn.Module, device: torch.device) -> None:
    """As `module.to(device)`, but tied parameters stay tied on every device."""
    for tensor in (*module.parameters(), *module.buffers()):
        give_value(tensor, tensor.data.to(device))
    tell_device(module, device)


def share_buffers(model: nn.Module | None) -> None:
    """Gives every rank rank 0's buffers (BatchNorm's statistics): an evaluation uses the same everywhere."""
    assert model is not None
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
