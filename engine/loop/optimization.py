"""Automatic optimization with honest accumulation: a window is divided by the number of micro-batches it has.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
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
        module = trainer.lightning_module
        optimizer = strategy.optimizers[0]
        self._divisor = self._planned_length(batch_idx)
        starts_window = batch_idx % trainer.accumulate_grad_batches == 0
        skips = self._skip_backward  # stochastic weight averaging has a pass without gradients
        closure = Closure(
            partial(self._flat_step, hooks, arguments),
            None if skips else partial(self._flat_backward, hooks, optimizer, ends_window),
            partial(self._flat_zero_grad, hooks, optimizer, batch_idx) if starts_window and not skips else None,
        )
        if ends_window:
            done = self.optim_progress.optimizer.step
            num_done = done.total.completed
            done.increment_ready()
            wrapped = strategy._lightning_optimizers[0]
            hooks.within("optimizer_step", module.optimizer_step, trainer.current_epoch, batch_idx, wrapped, closure)
            done.increment_completed()
            self._observe_norm(num_done)
        else:
            with _block_parallel_sync_behavior(strategy):
                closure()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _flat_step(self, hooks: Hooks, arguments: tuple[Any, ...]) -> ClosureResult:
        # Lightning: _AutomaticOptimization._training_step
        strategy = self.trainer.strategy
        output = hooks.within("training_step", strategy.training_step, *arguments)
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other"
                " ranks wait for this one's gradients. Return a loss of zero that depends on the parameters instead."
            )
        # A division by one would cost a node of the graph in each direction.
        plain = self._divisor == 1 and isinstance(output, Tensor)
        result = ClosureResult(output) if plain else ClosureResult.from_training_step_output(output, self._divisor)
        if result.loss is not None:
            self.watch.observe(self.trainer, "loss", result.loss, self.num_steps)
        return result

    def _flat_zero_grad(self, hooks: Hooks, optimizer: Optimizer, batch_idx: int) -> None:
        # Lightning: _AutomaticOptimization._on_before_zero_grad and _optimizer_zero_grad
        trainer = self.trainer
        done = self.optim_progress.optimizer.zero_grad
        done.increment_ready()
        hooks.call("on_before_zero_grad", optimizer)
        done.increment_started()
        zero_grad = trainer.lightning_module.optimizer_zero_grad
        hooks.within("optimizer_zero_grad", zero_grad, trainer.current_epoch, batch_idx, optimizer)
        done.increment_completed()

    def _flat_backward(self, hooks: Hooks, optimizer: Optimizer, ends_window: bool, loss: Tensor) -> None:
        # Lightning: _AutomaticOptimization._make_backward_fn
        hooks.within("backward", self.trainer.strategy.backward, loss, optimizer)
        if ends_window and self.trainer.accumulate_grad_batches != 1:
            self._correct(optimizer)

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
