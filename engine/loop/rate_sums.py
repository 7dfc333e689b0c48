"""Sums of the learning rates of a run's steps, which must be the same on all ranks.

A rank that steps with another rate shows in its weights under `ddp`, but not where each rank steps its own shards.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["RateSums", "unequal_rates"]


class RateSums:
    """For each group of optimizers, the sum of the learning rates of its steps, until it is closed.

    Args:
        optimizers: those of the run.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._sums: dict[Any, list[float]] = {o: [] for o in optimizers if isinstance(o, torch.optim.Optimizer)}
        self._handles = [optimizer.register_step_post_hook(self._add) for optimizer in self._sums]

    def _add(self, optimizer: Any, *_: Any) -> None:
        before = self._sums.get(optimizer)
        if before is None:  # a copy, with the hooks of its original: a server steps those under `ps`
            return
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        before += [0.0] * (len(rates) - len(before))  # groups that were added meanwhile
        # Others are tensors of a device, which the host would wait for.
        self._sums[optimizer] = [
            total + rate if isinstance(rate, float) else total for total, rate in zip(before, rates, strict=False)
        ]

    @property
    def sums(self) -> list[list[float]]:
        """The sums of each optimizer's groups."""
        return list(self._sums.values())

    def close(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()


def unequal_rates(sums: Sequence[list[list[float]]]) -> str | None:
    """Describes the first group whose sum of learning rates is not the same on all ranks.

    Args:
        sums: `RateSums.sums` of each rank.
    """
    for rank, of_rank in enumerate(sums):
        for index, (own, first) in enumerate(zip(of_rank, sums[0], strict=False)):
            for group, (a, b) in enumerate(zip(first, own, strict=False)):
                if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
                    where = f"optimizer {index}, group {group}"
                    return f"those of {where} add up to {a:.7g} on rank 0, to {b:.7g} on rank {rank}"
    return None
