"""Gradient clipping with the same result for gradients that are whole, sharded over a mesh, or both.

The norm is that of all gradients of the model, so every rank scales by the same number.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..compression.counting_group import accumulation_dtype
from ..devices import multiply
from ..distributed.buckets import local_part

__all__ = ["clip_by_norm", "clip_by_value", "local_values", "norm_of"]


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of the gradients (a 0-d tensor).

    Gradients that are sharded over a mesh need one all-reduce for each of its axes, whole ones none. No host
    synchronisation.
    """
    by_cut: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            _sum_over_ranks(p)
            cut, local = _cut(p.grad)
            by_cut[cut].append(local)
    if not by_cut:
        return torch.zeros(())
    norms = [_over_ranks(get_total_norm(local), *cut) for cut, local in by_cut.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, norm: Callable[[Iterable[Tensor]], Tensor] | None = None
) -> Tensor:
    """Scales the gradients so that their 2-norm is at most `max_norm`; returns the norm before (a 0-d tensor).

    Args:
        parameters: the parameters with the gradients.
        max_norm: largest norm of all gradients together.
        norm: computes the norm if other ranks have gradients of other parameters; None if no rank has.
    """
    parameters = list(parameters)
    if norm is None and not any(isinstance(p.grad, DTensor) for p in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    total = (norm or norm_of)(parameters)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch: clip_grads_with_norm_
    multiply((local_part(p.grad) for p in parameters if p.grad is not None), factor)
    return total


def clip_by_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamps every element of the gradients to [-max_value, max_value]; local on every rank."""
    for p in parameters:
        if p.grad is not None:
            _sum_over_ranks(p)
            local_part(p.grad).clamp_(-max_value, max_value)


def _sum_over_ranks(parameter: Tensor) -> None:
    """Sums a partial gradient over the ranks. A replicated layer has one if it precedes a split layer of its block."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _cut(gradient: Tensor) -> tuple[tuple[Any, tuple[int, ...]], Tensor]:
    """The mesh of a gradient and the axes over which it is sharded; and what this rank has of it."""
    if not isinstance(gradient, DTensor):
        return (None, ()), gradient
    axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh if axes else None, axes), gradient.to_local()


def _over_ranks(norm: Tensor, mesh: Any, axes: tuple[int, ...]) -> Tensor:
    if not axes:
        return norm
    square = norm.to(accumulation_dtype(norm.dtype)).square()
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square.sqrt()


def local_values(gradient: Tensor) -> Tensor:
    """Returns what this rank has of a gradient, as a dense tensor of the same memory."""
    local = local_part(gradient)
    return local._values() if local.is_sparse else local
