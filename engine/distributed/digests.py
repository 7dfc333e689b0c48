"""Digests of tensors: the sum and the norm of each, by which ranks compare gradients, weights and buffers.

Each rank computes the digests of its own shards; those of a whole tensor are their sums. Nothing is sent, and nothing
is read from a device, until somebody reads a digest.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .buckets import local_part

__all__ = ["Digests", "digests", "unequal_replicas", "whole"]

Piece = tuple[str, tuple[int, ...]]
"""The name of a tensor, and the place of a shard of it: its index along each axis that the tensor is sharded over."""


class Digests(NamedTuple):
    """The digests of a rank's tensors."""

    pieces: list[Piece]
    figures: Tensor | None
    """[pieces, 2]: sum, and sum of squares; None without pieces."""
    numels: list[int]
    """The number of values of each whole tensor."""

    def on_host(self) -> "Digests":
        """Returns the digests with their figures in host memory."""
        return self._replace(figures=None if self.figures is None else self.figures.cpu())


@torch.no_grad()
def digests(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Returns the digests of named tensors; those of a tensor whose values another rank has are left out."""
    pieces, figures, numels = [], [], []
    for name, tensor in tensors:
        if tensor.is_meta:
            continue
        local = _dense(tensor)
        # float64, so that the order of a sum, which differs between machines, does not show.
        dtype = torch.float32 if local.device.type == "mps" else torch.float64
        if not local.is_floating_point():  # a buffer that counts
            local = local.to(dtype)
        square = torch.linalg.vector_norm(local, dtype=dtype).square()
        figures.append(torch.stack([local.sum(dtype=dtype), square]))
        pieces.append((name, _place(tensor)))
        numels.append(tensor.numel())
    device = figures[0].device if figures else None
    return Digests(pieces, torch.stack([pair.to(device) for pair in figures]) if figures else None, numels)


def _dense(tensor: Tensor) -> Tensor:
    """Returns this rank's values of a tensor as a dense, real one."""
    tensor = local_part(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def unequal_replicas(
    ranks: Iterable[Digests], tolerance: float = 1e-9, *, by_size: bool = True
) -> list[tuple[str, str]]:
    """Compares the digests of what several ranks must have alike.

    Args:
        ranks: the digests of each rank.
        tolerance: the largest difference of a norm, relative to it; of a sum, relative to the norm.
        by_size: a sum may differ by as much more as the root of the number of values, as rounding does.

    Returns:
        The names of the tensors that differ, each with a description of the difference.
    """
    first: dict[Piece, tuple[int, float, float]] = {}
    unequal: dict[str, str] = {}
    for rank, of_rank in enumerate(ranks):
        for piece, (total, square), numel in _read(of_rank):
            owner, expected, expected_square = first.setdefault(piece, (rank, total, square))
            norm, expected_norm = square**0.5, expected_square**0.5
            allowed = tolerance * max(norm, expected_norm)
            is_equal = total == expected or abs(total - expected) <= allowed * (numel**0.5 if by_size else 1.0)
            is_equal &= norm == expected_norm or abs(norm - expected_norm) <= allowed
            if not is_equal and (total == total or expected == expected):  # both NaN: a rank can't differ by it
                is_norm = f"{norm:.7g}" != f"{expected_norm:.7g}" or total == expected
                what, first_value, value = ("norm", expected_norm, norm) if is_norm else ("sum", expected, total)
                digits = 17 if f"{value:.7g}" == f"{first_value:.7g}" else 7
                text = f"{what} {first_value:.{digits}g} on rank {owner}, {value:.{digits}g} on rank {rank}"
                unequal.setdefault(piece[0], text)
    return list(unequal.items())


def whole(ranks: Iterable[Digests]) -> dict[str, tuple[float, float]]:
    """Returns sum and norm of each whole tensor, by name, from the digests of all ranks."""
    pieces: dict[Piece, tuple[float, float]] = {}
    for of_rank in ranks:
        for piece, figures, _ in _read(of_rank):
            pieces.setdefault(piece, figures)
    totals: dict[str, tuple[float, float]] = {}
    for (name, _), (total, square) in pieces.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + total, before[1] + square
    return {name: (total, square**0.5) for name, (total, square) in totals.items()}


def _read(of_rank: Digests) -> list[tuple[Piece, tuple[float, float], int]]:
    figures: list[list[float]] = [] if of_rank.figures is None else of_rank.figures.tolist()
    return [
        (piece, (total, square), numel)
        for piece, (total, square), numel in zip(of_rank.pieces, figures, of_rank.numels, strict=True)
    ]


def _place(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    return tuple(c for c, placement in zip(coordinates, tensor.placements, strict=True) if not placement.is_replicate())
