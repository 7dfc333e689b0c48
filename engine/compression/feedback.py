"""Error feedback: what a lossy method has not sent is added to the gradients of its next step (arXiv:1901.09847).

Without it, whatever a method leaves out is lost for good, and training goes where the method likes. The law, which the
tests check: averages x ranks + all residuals = all gradients + all earlier residuals.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from ..flags import check_count
from .base import CommHook
from .bucket import Bucket
from .memory import Memory
from .wire import Wire

__all__ = ["LossyHook"]


class LossyHook(CommHook):
    """A method that sends part of what it is given, and keeps the rest for later.

    Args:
        feedback: keep the rest, 4 bytes a parameter in fp32; without, it is lost.
        start: steps of plain all-reduce before compression begins. Early gradients change too fast for what comes late:
            a tenth of a run is usual.
    """

    def __init__(self, feedback: bool = True, start: int = 0) -> None:
        super().__init__()
        self.feedback = feedback
        self.start = check_count(f"{self.name}:start", start, least=0)
        self._residuals = Memory(lambda bucket: {member: member.numel for member in bucket.members})

    def memories(self) -> dict[str, Memory]:
        """The residuals, if they are kept."""
        return {"residuals": self._residuals} if self.feedback else {}

    @abstractmethod
    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """Sends part of `total` [numel], takes it away from there, and writes its average over all ranks to
        ``bucket.gradients``."""

    def average(self, bucket: Bucket, wire: Wire) -> None:
        """Adds the residuals, exchanges, and keeps what is left; until `start`, averages as it is."""
        if self.step < self.start:
            wire.all_reduce(bucket.gradients.div_(wire.size))
            return
        if not self.feedback:
            self.exchange(bucket.gradients.clone(), bucket, wire)
            return
        residual, total = self._residuals.of(bucket), self._residuals.draft(bucket)
        if not self.finds_unused:
            self._exchange(residual, total, bucket, wire)
            return
        # What is sent for these would be thrown away.
        unused, before = _unused(bucket, wire), residual.clone()
        self._exchange(residual.masked_fill(unused, 0), total, bucket, wire)
        torch.where(unused, before, total, out=total)

    def _exchange(self, residual: Tensor, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """Writes to `total` what is left."""
        gradients = bucket.gradients
        if self._scaler is None:
            self.exchange(torch.add(gradients, residual, out=total), bucket, wire)
            return
        # Residuals are kept without the loss scale, which may be another one at the next step.
        scale = self._scaler.scale(torch.ones((), device=gradients.device)).to(gradients.dtype)
        self.exchange(torch.addcmul(gradients, residual, scale, out=total), bucket, wire)
        total.div_(scale)


def _unused(bucket: Bucket, wire: Wire) -> Tensor:
    """Which values [numel] are of members whose gradients are zero on all ranks: an all-reduce of 4 bytes a member."""
    used = torch.stack([part.any() for part in bucket.gradients.split(bucket.numels)])
    num_users = wire.all_reduce(used.int())
    parts = zip((num_users == 0).unbind(), bucket.numels, strict=True)
    return torch.cat([is_unused.expand(numel) for is_unused, numel in parts])
