"""Weights of the losses of the micro-batches in an optimizer step.

The gradient of a step is the gradient of the mean loss over all samples of its micro-batches, on all ranks. If
`training_step` returns a count beside its mean loss, as ``{"loss": mean, "weight": count}``, the mean is taken over
these counts instead. With the weight w_ij of micro-batch j of rank i, the sum T of all w_ij, and W ranks whose
gradients the strategy averages:

    gradient = 1/W sum_ij (W w_ij / T) gradient(mean loss_ij)

If each rank steps with its own gradient, W is 1 and T is the rank's own sum.

Communication: the numbers of samples follow from the order of samples, so nothing is sent for them. Weights of
`training_step` are summed over the ranks by two all-reduces of one number a step. The all-reduce in the first
micro-batch gives an estimate of T (T itself, if the step has one micro-batch). The all-reduce in the last micro-batch
runs during its backward; then the gradients are corrected. On accelerators the first all-reduce does not wait for the
forward if the weight is a Python number.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from ..contract import EngineStrategy
from ..data.global_order import Samples
from ..devices import multiply
from ..precision.clipping import local_values
from ..precision.loss_scaling import LossScaler

__all__ = ["LossWeighting"]


class LossWeighting:
    """Weighs the losses of the micro-batches of the current optimizer step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._strategy: EngineStrategy = trainer.engine_strategy  # type: ignore[attr-defined]
        self._first_batch_idx = -1
        self._estimate: Any = None
        """The estimate of T; None before the first micro-batch of a step."""
        self._is_known = False
        """Whether the estimate is T itself."""
        self._samples: dict[int, Samples] = {}
        """The numbers of samples, by micro-batch of the step."""
        self._total: Callable[[], Tensor] | None = None
        """Returns the sum of all weights of the step; None until the last micro-batch has begun this sum."""
        self._is_summed = False
        """Whether the gradients belong to the losses times their weights, and are not divided by T yet."""
        self._has_weights = False
        """Whether `training_step` has returned a weight for the last micro-batch."""
        self._weights: dict[int, Tensor] = {}
        """This rank's weights from `training_step`, by micro-batch: an optimizer may compute a loss several times."""
        self.data_size = 1
        """The number of ranks with different samples, set when the first epoch begins."""
        self._batch_idx = 0

    def begin_epoch(self) -> None:
        """Looks up the number of ranks, which no epoch changes."""
        self.data_size = self._trainer.data_size
        self._strategy.weight_of_step = self._weight_of_step
        if isinstance(scaler := getattr(self._trainer.precision_plugin, "scaler", None), LossScaler):
            scaler.num_averaged = lambda: self._num_ranks

    def weigh(
        self,
        loss: Tensor | None,
        output: Any,
        batch_idx: int,
        *,
        is_padding: bool = False,
        is_summed: bool = False,
    ) -> Tensor | None:
        """Returns the loss of a micro-batch times its weight; called also for a micro-batch without a loss.

        Args:
            loss: the mean over the micro-batch, a 0-d tensor; None without one.
            output: output of `training_step`.
            batch_idx: within the epoch.
            is_padding: the micro-batch is run for its collectives only: its weight is 0.
            is_summed: backward has run already, on the loss times its weight, which was not divided by T.

        Raises:
            ValueError: `training_step` has returned a weight for some micro-batches of a step only.
        """
        trainer = self._trainer
        window: int = trainer.accumulate_grad_batches
        # Tensors first, the usual case: the check for a mapping takes longer.
        weight = output.get("weight") if type(output) is not Tensor and isinstance(output, Mapping) else None
        if weight is None and window == 1 and not (is_padding or is_summed):
            return self._of_single(loss, batch_idx)
        first = batch_idx - batch_idx % window
        if first != self._first_batch_idx or (batch_idx == first and not is_padding):
            self.reset()
            self._first_batch_idx = first
        elif self._samples if weight is not None else self._weights:
            raise ValueError(
                "`training_step` returned a weight for some micro-batches of a step and none for others: return one for"
                " all of them (zero is allowed), or for none."
            )
        self._has_weights, self._is_summed = weight is not None, is_summed
        if weight is None or loss is None:
            return self._by_samples(loss, batch_idx)
        if is_padding:
            weight = 0
        return self._by_weight(loss, weight, batch_idx)

    def factor_of_batch(self, batch_idx: int) -> float:
        """Returns W w / T of this rank for a batch that is a whole step; 1 if all ranks have equally many samples."""
        num_ranks = self._num_ranks
        if num_ranks == 1:
            return 1.0
        samples = self._trainer._data_connector.sizes.samples(batch_idx)
        return samples.local * num_ranks / samples.total

    def as_weight(self, weight: Any, device: torch.device, batch_idx: int) -> Tensor:
        """Returns the weight from `training_step` as a 0-d float32 tensor; zero for a padding batch."""
        if isinstance(weight, Tensor):
            own_weight = weight.detach().to(device, torch.float32)
        else:  # filled on the device, since a copy from the host would wait for the device
            own_weight = torch.full((), float(weight), dtype=torch.float32, device=device)
        return torch.zeros_like(own_weight) if self._trainer._data_connector.sizes.is_filler(batch_idx) else own_weight

    def reset(self) -> None:
        """Drops the weights of the micro-batches so far: the next micro-batch is the first of its step."""
        self._first_batch_idx, self._estimate, self._total = -1, None, None
        self._samples.clear()
        self._weights.clear()

    def _of_single(self, loss: Tensor | None, batch_idx: int) -> Tensor | None:
        """Weighs the only micro-batch of a step by its samples; nothing is kept for the next call."""
        self._first_batch_idx, self._estimate, self._has_weights = -1, None, False
        self._batch_idx = batch_idx
        if loss is None or self.data_size == 1:
            return loss
        samples = self._trainer._data_connector.sizes.samples(batch_idx)
        if samples.local * self.data_size == samples.total:  # the usual case: this rank has its equal share
            return loss
        return _weighed(loss, samples.local, _samples_of(samples, self._num_ranks), self._num_ranks)

    def _by_samples(self, loss: Tensor | None, batch_idx: int) -> Tensor | None:
        sizes = self._trainer._data_connector.sizes
        samples, num_ranks = sizes.samples(batch_idx), self._num_ranks
        if self._estimate is None:
            planned = self._planned_length(batch_idx)
            weights = samples if planned == 1 else sizes.samples_of_step(self._first_batch_idx, planned)
            self._is_known = weights is not None
            times = planned if weights is None else 1
            self._estimate = _samples_of(weights or samples, num_ranks) * times
        self._samples[batch_idx] = samples
        if loss is None:
            return None
        return _weighed(loss, samples.local, self._estimate, num_ranks)

    def _by_weight(self, loss: Tensor, weight: Any, batch_idx: int) -> Tensor:
        own_weight = self._weights[batch_idx] = self.as_weight(weight, loss.device, batch_idx)
        if self._estimate is None:
            num_planned = self._planned_length(batch_idx)
            self._is_known = num_planned == 1
            is_number = not isinstance(weight, Tensor)
            # A Python number is filled into a second tensor, so that the sum's stream need not wait for `own_weight`.
            estimate = self._begin_sum(
                lambda: self.as_weight(weight, loss.device, batch_idx) if is_number else own_weight.clone(),
                needs_device=not is_number,
            )()
            estimate = estimate * num_planned
            self._estimate = torch.where(estimate > 0, estimate, 1.0)
        is_last = not self._trainer.fit_loop._should_accumulate()  # Lightning: whether the optimizer steps after it
        if is_last and self._total is None and (self._is_summed or not self._is_known):
            self._total = self._begin_sum(self._weights_of_step, needs_device=True)
        # The mean over no elements is NaN.
        return loss.masked_fill(own_weight == 0, 0.0) * (own_weight * self._num_ranks / self._estimate)

    def correct(self) -> None:
        """Corrects the gradients of the optimizers after the last backward of a step, from the estimate of T to T."""
        if self._estimate is None or (self._is_known and not self._is_summed):
            return
        if self._samples:
            num_samples = sum(_samples_of(samples, self._num_ranks) for samples in self._samples.values())
            factor = self._estimate / max(num_samples, 1)
        else:
            total = (self._total or self._begin_sum(self._weights_of_step, needs_device=True))()
            factor = torch.where(total > 0, (self._num_ranks if self._is_summed else self._estimate) / total, 1.0)
        groups = [group for optimizer in self._trainer.strategy.optimizers for group in optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        multiply(map(local_values, gradients), factor)

    @property
    def _num_ranks(self) -> int:
        """The number of ranks whose gradients are averaged: all that have samples, or 1."""
        return self.data_size if self._strategy.averages_gradients else 1

    def _planned_length(self, batch_idx: int) -> int:
        """Returns the expected number of micro-batches of the step; the last of an epoch may have fewer."""
        full: int = self._trainer.accumulate_grad_batches
        if full == 1:
            return 1
        remaining = self._trainer.num_training_batches - (batch_idx - batch_idx % full)
        return full if remaining > full else max(1, int(remaining))

    def _weight_of_step(self) -> tuple[Any, int | None]:
        """See `EngineStrategy`."""
        if self._weights:
            return self._weights_of_step(), None
        if self._first_batch_idx < 0:
            return self._trainer._data_connector.sizes.samples(self._batch_idx)
        of_step = self._samples.values()
        return sum(samples.local for samples in of_step), sum(samples.total for samples in of_step)

    def _weights_of_step(self) -> Tensor:
        """Returns the sum of this rank's weights, a 0-d tensor."""
        return torch.stack(list(self._weights.values())).sum()

    def _begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins the sum over the ranks whose gradients are averaged; see `EngineStrategy`."""
        if self._num_ranks > 1:
            return self._strategy.begin_sum(make, needs_device=needs_device)
        total = make()
        return lambda: total


def _weighed(loss: Tensor, own_samples: int, total_samples: float, num_ranks: int) -> Tensor:
    """Returns a mean loss times its share of all samples of the step, and times the number of ranks."""
    # Infinite for a padding batch, whose loss becomes 0.
    divisor = total_samples / (own_samples * num_ranks) if own_samples else torch.inf
    return loss if divisor == 1 else loss / divisor


def _samples_of(samples: Samples, num_ranks: int) -> int:
    """The number of samples of the ranks whose gradients are averaged, `num_ranks` of them."""
    return samples.local if num_ranks == 1 else samples.total
