"""Automatic optimization with honest accumulation: a window is divided by the number of micro-batches it has.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from .hooks import Hooks
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

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps done."""
        return self.optim_progress.optimizer.step.total.completed

    def run_flat(self, hooks: Hooks, batch_idx: int, arguments: tuple[Any, ...], ends_window: bool) -> dict[str, Any]:
        """What `run` does, by way of the hooks that are there.

        Args:
            hooks: of this run.
            batch_idx: within the epoch.
            arguments: of `training_step`.
            ends_window: whether the optimizer steps after this micro-batch.
        """
        # Lightning: _AutomaticOptimization.run and what it calls; from `optimizer_step` on it is Lightning's own.
        trainer = self.trainer
        strategy = trainer.strategy
        self._divisor = self._planned_length(batch_idx)
        closure = _MicroBatch(self, hooks, batch_idx, arguments, ends_window)
        if ends_window:
            steps = self.optim_progress.optimizer.step
            num_steps = steps.total.completed
            steps.total.ready += 1
            steps.current.ready += 1
            step = trainer.lightning_module.optimizer_step
            wrapped = strategy._lightning_optimizers[0]
            hooks.within("optimizer_step", step, trainer.current_epoch, batch_idx, wrapped, closure)
            steps.total.completed += 1
            steps.current.completed += 1
            self._observe_norm(num_steps)
        elif isinstance(strategy, ParallelStrategy):
            with strategy.block_backward_sync():
                closure()
        else:
            closure()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _planned_length(self, batch_idx: int) -> int:
        """Number of micro-batches in this one's window, as far as the length of the epoch is known."""
        full = self.trainer.accumulate_grad_batches
        if full == 1:
            return 1
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
        self._observe_norm(step)

    def _observe_norm(self, step: int) -> None:
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


class _MicroBatch(Closure):  # Lightning: the optimizer calls it, or nobody: then it says so
    """Forward, zeroing of gradients and backward of one micro-batch."""

    def __init__(
        self,
        optimization: AutomaticOptimization,
        hooks: Hooks,
        batch_idx: int,
        arguments: tuple[Any, ...],
        ends_window: bool,
    ) -> None:
        self._result = None
        self._optimization = optimization
        self._hooks = hooks
        self._batch_idx = batch_idx
        self._arguments = arguments
        self._ends_window = ends_window

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if torch.is_grad_enabled():
            self._result = self.closure()
        else:
            with torch.enable_grad():
                self._result = self.closure()
        return self._result.loss

    def closure(self) -> ClosureResult:
        # Lightning: Closure.closure
        optimization, hooks = self._optimization, self._hooks
        trainer = optimization.trainer
        optimizer = trainer.strategy.optimizers[0]
        result = self._forward(trainer)
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        if optimization._skip_backward:  # stochastic weight averaging has a pass without gradients
            return result
        if self._batch_idx % trainer.accumulate_grad_batches == 0:
            self._zero_grad(trainer, optimizer)
        if result.closure_loss is not None:
            hooks.within("backward", trainer.strategy.backward, result.closure_loss, optimizer)
            if self._ends_window and trainer.accumulate_grad_batches != 1:
                optimization._correct(optimizer)
        return result

    def _forward(self, trainer: Trainer) -> ClosureResult:
        # Lightning: _AutomaticOptimization._training_step
        optimization = self._optimization
        output = self._hooks.within("training_step", trainer.strategy.training_step, *self._arguments)
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other"
                " ranks wait for this one's gradients. Return a loss of zero that depends on the parameters instead."
            )
        divisor = optimization._divisor
        # A division by one would cost a node of the graph in each direction.
        plain = divisor == 1 and isinstance(output, Tensor)
        result = ClosureResult(output) if plain else ClosureResult.from_training_step_output(output, divisor)
        if result.loss is not None:
            optimization.watch.observe(trainer, "loss", result.loss, optimization.num_steps)
        return result

    def _zero_grad(self, trainer: Trainer, optimizer: Optimizer) -> None:
        # Lightning: _AutomaticOptimization._on_before_zero_grad and _optimizer_zero_grad
        zero_grad = trainer.lightning_module.optimizer_zero_grad
        progress = self._optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self._hooks.call("on_before_zero_grad", optimizer)
        progress.increment_started()
        self._hooks.within("optimizer_zero_grad", zero_grad, trainer.current_epoch, self._batch_idx, optimizer)
        progress.increment_completed()
