"""Combines the losses and weights of the micro-batches of a batch, on the last stage.

The loss of a batch is the mean over its micro-batches; or, where `training_step` returns ``{"loss": mean, "weight":
count}``, the mean weighted by these counts. The sum of the weights is known after the last forward, when most backward
passes are over: so the gradients are those of the sum of losses times weights, which the loop divides.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Losses"]


class Losses:
    """The losses and weights of the micro-batches of one batch.

    Args:
        weigh: maps a micro-batch's weight to the factor on its loss; None maps to the factor on the batch's mean loss.
        number: number of micro-batches.
        scale: multiplies the loss of a backward by the loss scale, if there is one.
    """

    def __init__(self, weigh: Callable[[Any], Tensor], number: int, scale: Callable[[Tensor], Tensor]) -> None:
        self._weigh, self._number, self._scale_loss = weigh, number, scale
        self._means: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, output: Any) -> Tensor:
        """Adds a micro-batch; returns the scalar to run backward on.

        Args:
            output: output of `training_step`.

        Raises:
            ValueError: it has no loss; or some micro-batches have a weight, and others have none.
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
            return self._scale_loss(loss * (counts / self._number))
        loss = loss.masked_fill(counts == 0, 0.0)  # the mean over zero samples is NaN
        self._means.append(loss.detach())
        self._weights.append(counts)
        return self._scale_loss(loss * counts)

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """Returns the batch's mean loss, and its weight, or None if `training_step` returned no weights."""
        means = torch.stack(self._means)
        if not self._weights:
            return means.mean(), None
        weights = torch.stack(self._weights)
        total = weights.sum()
        return (means * weights).sum() / torch.where(total > 0, total, 1.0), total


def _loss(output: Any) -> Tensor:
    """Returns the loss in an output of `training_step`."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` must return a loss in a pipeline, a tensor or a dict with one under 'loss', but it"
            f" returned {type(output).__name__}: a step can't be skipped by one stage alone."
        )
    return loss
