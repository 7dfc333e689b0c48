"""Automatic optimization with honest accumulation: a window is divided by the number of micro-batches it has.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from torch import Tensor
from torch.optim import Optimizer

from .nonfinite import NonFiniteWatch

__all__ = ["AutomaticOptimization"]


class AutomaticOptimization(_AutomaticOptimization):  # Lightning: _TrainingEpochLoop.automatic_optimization
    """Lightning's, with windows divided by their own length and a watch on the loss."""

    def __init__(self, trainer: Trainer, watch: NonFiniteWatch) -> None:
        super().__init__(trainer)
        self.watch = watch
        self._divisor = 1

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """One micro-batch, and the optimizer step where it ends a window."""
        self._divisor = self._planned_length(batch_idx)
        return super().run(optimizer, batch_idx, kwargs)

    def _planned_length(self, batch_idx: int) -> int:
        """Number of micro-batches in this one's window, as far as the length of the epoch is known."""
        full = self.trainer.accumulate_grad_batches
        left = self.trainer.num_training_batches - (batch_idx - batch_idx % full)
        return full if left > full else max(1, int(left))

    def _training_step(self, kwargs: OrderedDict) -> ClosureResult:
        # Lightning: _AutomaticOptimization._training_step, which divides by the constant.
        full = self.trainer.accumulate_grad_batches
        result = super()._training_step(kwargs)
        if result.closure_loss is not None:
            if self._divisor != full:
                result.closure_loss = result.closure_loss * (full / self._divisor)
                result.loss = result.closure_loss.detach().clone()
            self.watch.observe(self.trainer, "loss", result.loss, self.trainer.global_step)
        return result

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        # Lightning: _AutomaticOptimization._optimizer_step
        step = self.trainer.global_step
        super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        plugin = self.trainer.precision_plugin
        if getattr(plugin, "scaler", None) is None:  # a loss scale overflows by design, and skips the step then
            self.watch.observe(self.trainer, "gradient norm", getattr(plugin, "grad_norm", None), step)

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        # Lightning: _AutomaticOptimization._make_backward_fn
        backward = super()._make_backward_fn(optimizer)
        if backward is None or self.trainer.accumulate_grad_batches == 1:
            return backward

        def backward_and_correct(loss: Tensor) -> None:
            backward(loss)
            self._correct(optimizer)

        return backward_and_correct

    def _correct(self, optimizer: Optimizer) -> None:
        """Scales the gradients of a window that ended before its planned length: a loader of unknown length did."""
        trainer = self.trainer
        if trainer.fit_loop._should_accumulate():
            return
        num_ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        length = (num_ready - 1) % trainer.accumulate_grad_batches + 1
        if length != self._divisor:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, self._divisor / length)
