"""The losses and weights of the micro-batches of a batch, on the last stage.

A batch counts as the mean of its micro-batches; or, where `training_step` returns ``{"loss": mean, "weight": count}``,
each of them counts as it says. The sum of these is known after the last forward, when most backwards are over: the
gradients are then those of the sum of all losses times their weights, which the loop divides.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Losses"]


class Losses:
    """The losses and weights of the micro-batches of one batch.

    Args:
        weigh: says what a micro-batch counts for, given its weight; given None, what the batch's mean loss does.
        number: of micro-batches.
    """

    def __init__(self, weigh: Callable[[Any], Tensor], number: int) -> None:
        self._weigh, self._number = weigh, number
        self._means: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, output: Any) -> Tensor:
        """The scalar of which backward is to be run, for a micro-batch's output of `training_step`.

        Raises:
            ValueError: it has no loss, or a weight and those before it had none, or the other way round.
        """
        loss, weight = _loss(output), output.get("weight") if isinstance(output, Mapping) else None
        if self._means and (weight is None) == bool(self._weights):
            raise ValueError(
                "`training_step` returned a weight for some micro-batches of a batch and none for others: return one"
                " for all of them (zero is allowed), or for none."
            )
        counts = self._weigh(weight)
        if weight is None:
            self._means.append(loss.detach())
            return loss * (counts / self._number)
        loss = loss.masked_fill(counts == 0, 0.0)  # the mean of nothing is not a number
        self._means.append(loss.detach())
        self._weights.append(counts)
        return loss * counts

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The batch's mean loss, and its weight, if `training_step` has said one."""
        means = torch.stack(self._means)
        if not self._weights:
            return means.mean(), None
        weights = torch.stack(self._weights)
        total = weights.sum()
        return (means * weights).sum() / torch.where(total > 0, total, 1.0), total


def _loss(output: Any) -> Tensor:
    """The loss in what `training_step` returned for a micro-batch."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` must return a loss in a pipeline, a tensor or a dict with one under 'loss', but it"
            f" returned {type(output).__name__}: a step can't be skipped by one stage alone."
        )
    return loss
