"""Gradient clipping that means the same whether gradients are whole, sharded over a mesh, or both.

The norm is that of all gradients of the model, so every rank scales by the same number.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_by_norm", "clip_by_value"]


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales the gradients so that their 2-norm is at most `max_norm`; returns the norm before (a 0-d tensor).

    Sharded gradients need one all-reduce per mesh, whole ones none. No host synchronisation.
    """
    parameters = [p for p in parameters if p.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p.grad)  # type: ignore[arg-type]
    norms = [_whole(get_total_norm(gradients)) for gradients in by_mesh.values()]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for mesh in by_mesh:
        group = [p for p in parameters if (p.grad.device_mesh if isinstance(p.grad, DTensor) else None) is mesh]
        clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_by_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamps every element of the gradients to [-max_value, max_value]; local on every rank."""
    for p in parameters:
        if p.grad is not None:
            _local(p.grad).clamp_(-max_value, max_value)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
