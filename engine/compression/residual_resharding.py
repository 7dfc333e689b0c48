"""Redistributes residuals (values not sent yet) to a different number or layout of ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["reshard_residuals"]


def reshard_residuals(
    saved: list[dict[str, Tensor]],
    shapes: dict[str, torch.Size],
    *,
    saved_shards: int,
    shards: int,
    rank: int,
) -> dict[str, Tensor]:
    """Returns this rank's residuals: the mean over the saved replicas, the same for every new replica.

    The weights are updated with averages over replicas, so the mean preserves the pending update for any number of
    ranks: residuals of 1 on four ranks stand for an update of 1, also on one, two or eight ranks.

    Args:
        saved: residuals of each saved rank by parameter name; shards are the inner axis of the rank order.
        shapes: shapes of the unsharded parameters; other parameters are left out.
        saved_shards: number of shards along the first dim of each saved parameter.
        shards: number of shards now.
        rank: this rank.
    """
    names = {name for residuals in saved for name in residuals if name in shapes}
    return {
        name: _part(
            _whole([residuals.get(name) for residuals in saved], shapes[name], saved_shards), shards, rank % shards
        )
        for name in sorted(names)
    }


def _whole(residuals: list[Any], shape: torch.Size, shards: int) -> Tensor:
    """Returns the unsharded mean over replicas, [rows, ...]; a missing residual counts as zero."""
    rows = shape[0] if shape else 1
    parts = []
    for shard in range(shards):
        replicas = [residual.flatten() for residual in residuals[shard::shards] if residual is not None]
        width = shape.numel() // max(rows, 1)
        num_replicas = len(residuals) // shards
        parts.append(sum(replicas) / num_replicas if replicas else torch.zeros(-(-rows // shards) * width))
    return torch.cat(parts)[: shape.numel()].view(rows, -1)


def _part(whole: Tensor, shards: int, shard: int) -> Tensor:
    """Returns one of `shards` equal parts along the first dim, padded with zeros; flat."""
    rows = -(-whole.size(0) // shards)
    return functional.pad(whole, (0, 0, 0, rows * shards - whole.size(0)))[shard * rows : (shard + 1) * rows].flatten()
