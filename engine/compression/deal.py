"""Deals the residuals, which ranks had not sent yet, to another number or layout of ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["deal_residuals"]


def deal_residuals(
    saved: list[dict[str, Tensor]],
    shapes: dict[str, torch.Size],
    *,
    saved_shards: int,
    shards: int,
    rank: int,
) -> dict[str, Tensor]:
    """This rank's residuals: the mean over the saved replicas, which every replica gets.

    Averages over the replicas are applied to the weights, so the mean is what is owed to them, on any number of ranks:
    four ranks' residuals of 1 are still worth an update of 1 on one, two or eight ranks.

    Args:
        saved: each saved rank's residuals by the names of parameters; shards are the inner axis of the ranks' order.
        shapes: of the whole parameters; others are left out.
        saved_shards: number of parts, along the first dim, that each saved parameter was cut into.
        shards: the same, now.
        rank: this one.
    """
    names = {name for residuals in saved for name in residuals if name in shapes}
    return {
        name: _part(
            _whole([residuals.get(name) for residuals in saved], shapes[name], saved_shards), shards, rank % shards
        )
        for name in sorted(names)
    }


def _whole(residuals: list[Any], shape: torch.Size, shards: int) -> Tensor:
    """The mean over replicas, of all shards: [rows, ...]. Who has none has sent all."""
    rows = shape[0] if shape else 1
    parts = []
    for shard in range(shards):
        there = [residual.flatten() for residual in residuals[shard::shards] if residual is not None]
        width = shape.numel() // max(rows, 1)
        num_replicas = len(residuals) // shards
        parts.append(sum(there) / num_replicas if there else torch.zeros(-(-rows // shards) * width))
    return torch.cat(parts)[: shape.numel()].view(rows, -1)


def _part(whole: Tensor, shards: int, shard: int) -> Tensor:
    """One of `shards` equal parts along the first dim, filled up with zeros; flat."""
    rows = -(-whole.size(0) // shards)
    return functional.pad(whole, (0, 0, 0, rows * shards - whole.size(0)))[shard * rows : (shard + 1) * rows].flatten()
