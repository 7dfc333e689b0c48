"""Muon's Newton-Schulz iteration on split matrices: each is computed once in a group, by one rank, not by all of them.

As Dion's and torchtitan's Muon do. `torch.optim.Muon` keeps its groups, state and hooks; only its function of the lists
of parameters and gradients is replaced while a step runs. Momentum is updated on the shards. Phases of a step, for each
group of parameters: 1. matrices are dealt to the ranks, the most work first (local); 2. each rank sends its shards,
rounded to 16 bits as Newton-Schulz rounds them, to the owners: one all-to-all, 2 n (W-1)/W bytes a rank for n values
over W ranks; 3. Newton-Schulz of the rank's own matrices (local); 4. the owners send each rank its shards of the
results: the same again. Blocks in 2 and 4. Results are those of whole matrices, bit for bit.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._compat.torch import _muon

__all__ = ["dealing_matrices"]


@contextlib.contextmanager
def dealing_matrices() -> Iterator[None]:
    """Context of a step of `torch.optim.Muon`."""
    whole = _muon._single_tensor_muon  # torch: what Muon's step calls for each group
    _muon._single_tensor_muon = partial(_step, whole)
    try:
        yield
    finally:
        _muon._single_tensor_muon = whole


def _step(
    whole: Callable[..., None], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], **settings: Any
) -> None:
    """Steps the matrices that are split over one group; `whole`, torch's own, steps all others."""
    by_cut: dict[Any, list[int]] = {}
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        by_cut.setdefault(_axis(param, grad, momenta[index]), []).append(index)
    for cut, indices in by_cut.items():
        part = [[tensors[index] for index in indices] for tensors in (params, grads, momenta)]
        if cut is None:
            whole(*part, **settings)
        else:
            _step_dealt(cut[0].get_group(cut[1]), *part, **settings)


def _axis(*tensors: Any) -> tuple[Any, int] | None:
    """The mesh, and its only axis over which a parameter, its gradient and its momentum are split; None otherwise."""
    param = tensors[0]
    if not all(isinstance(t, DTensor) and t.placements == param.placements for t in tensors):
        return None
    axes = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
    is_plain = len(axes) == 1 and type(param.placements[axes[0]]) is Shard
    return (param.device_mesh, axes[0]) if is_plain and param.device_mesh.size(axes[0]) > 1 else None


def _step_dealt(
    group: Any,
    params: list[Any],
    grads: list[Any],
    momenta: list[Any],
    *,
    lr: Any,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
) -> None:
    # torch: _single_tensor_muon, in which all but Newton-Schulz is element by element.
    lr = float(lr)
    num_ranks, rank, device = group.size(), group.rank(), grads[0].to_local().device
    dims = [next(p.dim for p in param.placements if not p.is_replicate()) for param in params]
    updates: list[Tensor] = []
    for grad, buffer, dim in zip(grads, momenta, dims, strict=True):
        own_grad, own_buffer = grad.to_local(), buffer.to_local()
        own_buffer.lerp_(own_grad, 1 - momentum)
        update = own_grad.lerp(own_buffer, momentum) if nesterov else own_buffer
        updates.append(update.bfloat16().transpose(0, dim))
    owners = _owners([param.shape for param in params], num_ranks)  # phase 1
    lengths = [_lengths(param.shape[dim], num_ranks) for param, dim in zip(params, dims, strict=True)]
    widths = [param.shape[1 - dim] for param, dim in zip(params, dims, strict=True)]
    own = [index for index, owner in enumerate(owners) if owner == rank]
    to_owners = [[updates[i] for i, owner in enumerate(owners) if owner == other] for other in range(num_ranks)]
    from_ranks = [[(lengths[i][other], widths[i]) for i in own] for other in range(num_ranks)]
    shards = _exchange(to_owners, from_ranks, device, group)  # phase 2
    results: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for position, index in enumerate(own):  # phase 3
        matrix = torch.cat([shards[other][position] for other in range(num_ranks)]).transpose(0, dims[index])
        matrix = _muon._zeropower_via_newtonschulz(matrix, ns_coefficients, ns_steps, eps).transpose(0, dims[index])
        for other, piece in enumerate(matrix.split(lengths[index])):
            results[other].append(piece)
    of_owners: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for index, owner in enumerate(owners):
        of_owners[owner].append((lengths[index][rank], widths[index]))
    received = [iter(pieces) for pieces in _exchange(results, of_owners, device, group)]  # phase 4
    for param, dim, owner in zip(params, dims, owners, strict=True):
        local, change = param.to_local(), next(received[owner]).transpose(0, dim)
        local.mul_(1 - lr * weight_decay)
        local.add_(change, alpha=-_muon._adjust_lr(lr, adjust_lr_fn, param.shape))


def _owners(shapes: list[torch.Size], num_ranks: int) -> list[int]:
    """Deals matrices to ranks, those with the most work first, each to the rank with the least so far."""
    work = [0] * num_ranks
    owners = [0] * len(shapes)
    of_each = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -of_each[index]):
        owners[index] = work.index(min(work))
        work[owners[index]] += of_each[index]
    return owners


def _lengths(length: int, num_ranks: int) -> list[int]:
    """The rows of each rank's shard: torch's chunks, of which the last ones may be shorter, or empty."""
    chunk = -(-length // num_ranks)
    return [max(0, min(chunk, length - rank * chunk)) for rank in range(num_ranks)]


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], device: torch.device, group: Any
) -> list[list[Tensor]]:
    """Sends each rank its list of matrices; returns those that each rank has sent, which have the given shapes."""
    # As bytes: gloo does not know bfloat16.
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    flats = [torch.cat([empty, *(m.reshape(-1) for m in matrices)]) for matrices in sent]
    flat = torch.cat(flats)
    counts = [sum(rows * columns for rows, columns in of_rank) for of_rank in shapes]
    room = flat.new_empty(sum(counts))
    in_bytes = [part.nbytes for part in flats]
    dist.all_to_all_single(
        room.view(torch.uint8), flat.view(torch.uint8), [2 * count for count in counts], in_bytes, group
    )
    return [
        [piece.view(shape) for piece, shape in zip(part.split([a * b for a, b in of_rank]), of_rank, strict=True)]
        for part, of_rank in zip(room.split(counts), shapes, strict=True)
    ]
