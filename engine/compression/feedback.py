"""Error feedback: values that a lossy method has not sent are added to the next gradients (arXiv:1901.09847).

Without it, unsent values are lost and training is biased. The tests check this invariant: averages x ranks + all
residuals = all gradients + decay x all earlier residuals.

With a decay below 1, gradients that are not sent for long are forgotten, and what is sent late is a sum with falling
weights: a momentum, for which SparseLoCo (arXiv:2508.15706) does without another one.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count, check_number
from .base import CommHook, ParameterState
from .counting_group import Bucket, CountingGroup, ParamSlice

__all__ = ["ErrorFeedbackHook", "reshard_residuals"]


class ErrorFeedbackHook(CommHook):
    """Base class of methods that send a part of the gradients, and keep the rest for later steps.

    Args:
        feedback: keep the rest, 4 bytes per parameter in fp32; otherwise it is lost.
        start: number of steps with plain all-reduce before compression begins, because early gradients change too fast
            for delayed values; a tenth of a run is usual.
        decay: the rest is multiplied by it before it is added to the next gradients.
    """

    works_in_place: ClassVar[bool] = False
    """Whether `exchange` takes the gradients themselves as `total`, if the rest is not kept."""

    def __init__(self, feedback: bool = True, start: int = 0, decay: float = 1.0) -> None:
        super().__init__()
        self.feedback = feedback
        self.start = check_count(f"{self.name}:start", start, least=0)
        self.decay = check_number(f"{self.name}:decay", decay, above=0, most=1)
        if decay != 1 and not feedback:
            raise ValueError(
                f"{self.name}:decay={decay:g} is of the rest that feedback=false does not keep: leave out one of them."
            )
        self._residuals = ParameterState(_numels)

    def memories(self) -> dict[str, ParameterState]:
        """Returns the residuals, if they are kept."""
        return {"residuals": self._residuals} if self.feedback else {}

    @abstractmethod
    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """Sends a part of `total` [numel], subtracts it from `total`, and writes its average over all ranks to
        ``bucket.gradients``."""

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Adds the residuals, exchanges, and keeps the unsent rest; averages without compression until `start`."""
        if self.step < self.start:
            wire.all_reduce(bucket.gradients.div_(wire.size))
            return
        if not self.feedback:
            self.exchange(bucket.gradients if self.works_in_place else bucket.gradients.clone(), bucket, wire)
            return
        residual, total = self._residuals.values_of(bucket), self._residuals.stage(bucket)
        if not self.finds_unused:
            self._exchange(residual, total, bucket, wire)
            return
        # Values sent for unused parameters would be discarded.
        unused, before = _unused(bucket, wire), residual.clone()
        self._exchange(residual.masked_fill(unused, 0), total, bucket, wire)
        torch.where(unused, before, total, out=total)

    def _exchange(self, residual: Tensor, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """Exchanges, and writes the unsent rest to `total`."""
        gradients = bucket.gradients
        if self._scaler is None:
            self.exchange(torch.add(gradients, residual, alpha=self.decay, out=total), bucket, wire)
            return
        # Residuals are kept without the loss scale, since the scale may differ at the next step.
        scale = self._scaler.scale(torch.ones((), device=gradients.device)).to(gradients.dtype)
        self.exchange(torch.addcmul(gradients, residual, scale, value=self.decay, out=total), bucket, wire)
        total.div_(scale)


def _numels(bucket: Bucket) -> dict[ParamSlice, int]:
    return {member: member.numel for member in bucket.members}


def _unused(bucket: Bucket, wire: CountingGroup) -> Tensor:
    """Returns a mask [numel] of members whose gradients are zero on all ranks; one all-reduce of 4 bytes per member."""
    used = torch.stack([part.any() for part in bucket.gradients.split(bucket.numels)])
    num_users = wire.all_reduce(used.int())
    parts = zip((num_users == 0).unbind(), bucket.numels, strict=True)
    return torch.cat([is_unused.expand(numel) for is_unused, numel in parts])


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
