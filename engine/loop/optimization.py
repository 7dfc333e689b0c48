"""Automatic optimization, with micro-batches that are weighted by their samples: see `loss_weighting.py`.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor, and a short batch counts for as much as a full one.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from .._compat.lightning import _AutomaticOptimization
from ..precision.plugins import stepping_together
from ..reliability.nonfinite import NonFiniteWatch
from ..strategies import capabilities_of, without_sync
from ..strategies.step_guard import StepGuard
from .hooks import Hooks
from .loss_weighting import LossWeighting
from .out_of_memory import OutOfMemory
from .padding_batch import beside_fillers
from .several_optimizers import SharedClosure
from .shortcuts import Shortcuts
from .transfer import Transfer

__all__ = ["AutomaticOptimization", "check_may_skip"]


def check_may_skip(trainer: Trainer, batch_idx: int) -> None:
    """Checks that a rank may skip a batch that is None.

    Raises:
        RuntimeError: there are other ranks.
    """
    if trainer.world_size > 1:
        raise RuntimeError(
            f"The train_dataloader yielded None as batch {batch_idx} of rank {trainer.global_rank}, and the other ranks"
            " would wait forever. Let its `collate_fn` return a batch, or leave the samples out of the data set."
        )


class AutomaticOptimization(_AutomaticOptimization):  # Lightning: _TrainingEpochLoop.automatic_optimization
    """Lightning's automatic optimization, with weighted micro-batches and a check for losses that are not finite."""

    def __init__(self, trainer: Trainer, watch: NonFiniteWatch) -> None:
        super().__init__(trainer)
        self.watch = watch
        self.loss_weighting = LossWeighting(trainer)
        self.runs_own_schedule = capabilities_of(trainer.strategy).runs_own_schedule
        self.out_of_memory: OutOfMemory | None = None
        self._batch_idx = 0
        self.has_loss = False
        """Whether `training_step` has returned a loss."""
        self.num_skipped = 0
        """The number of times that `training_step` has returned None."""
        self.step_guard: StepGuard | None = None
        """Leaves out steps that are not finite; None: none is left out."""

    def begin_epoch(self) -> None:
        """Looks up the values that stay the same for an epoch, which would cost each step several calls."""
        self.trainer._data_connector.sizes.begin_epoch()  # type: ignore[attr-defined]
        self.loss_weighting.begin_epoch()

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Runs one micro-batch, and the optimizer step if it ends a window."""
        self._batch_idx = batch_idx
        if self.step_guard is not None:
            self.step_guard.begin_micro_batch()
        return super().run(optimizer, batch_idx, kwargs)

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps that are done."""
        return self.optim_progress.optimizer.step.total.completed

    def run_flat(
        self, hooks: Hooks, shortcuts: Shortcuts, batch_idx: int, arguments: tuple[Any, ...], ends_window: bool
    ) -> dict[str, Any]:
        """Runs a micro-batch as `run` does, but calls only overridden hooks.

        Args:
            hooks: hooks of this run.
            shortcuts: shortcuts that were built from these hooks.
            batch_idx: index of the micro-batch within the epoch.
            arguments: arguments of `training_step`.
            ends_window: whether the optimizer steps after this micro-batch.
        """
        # Lightning: _AutomaticOptimization.run and what it calls; from `optimizer_step` on see `Shortcuts`.
        trainer: Any = self.trainer
        optimizer = hooks.strategy.optimizers[0]
        if self.step_guard is not None:
            self.step_guard.begin_micro_batch()
        closure = _MicroBatch(self, hooks, shortcuts, optimizer, batch_idx, arguments, ends_window)
        if ends_window:
            steps = self.optim_progress.optimizer.step
            num_steps = steps.total.completed
            steps.total.ready += 1
            steps.current.ready += 1
            if len(hooks.strategy.optimizers) == 1:
                shortcuts.optimizer_step(batch_idx, optimizer, closure)
            else:
                self._step_together(batch_idx, closure)
            steps.total.completed += 1
            steps.current.completed += 1
            self._observe_norm(hooks.precision, num_steps)
        else:
            with without_sync(hooks.strategy):
                closure()
        trainer.heartbeat.phase = "batch"
        if closure.ran_out_of_memory:
            return {}
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _training_step(self, kwargs: OrderedDict) -> ClosureResult:
        # Lightning: _AutomaticOptimization._training_step, which divides by the constant.
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return self.weighted_result(output, self._batch_idx)

    def weighted_result(self, output: Any, batch_idx: int) -> ClosureResult:
        """Returns `training_step`'s result, with a loss that can be added to those of the other micro-batches."""
        trainer = self.trainer
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other"
                " ranks wait for this one's gradients. Return a loss of zero that depends on the parameters instead."
            )
        # Lightning: raises its own error for a value that is no loss.
        if type(output) is Tensor:
            result: ClosureResult = _TensorResult(self.loss_weighting.weigh(output, output, batch_idx))
        else:
            unweighted = ClosureResult.from_training_step_output(output)
            weighed = self.loss_weighting.weigh(unweighted.closure_loss, output, batch_idx)
            is_same = weighed is unweighted.closure_loss
            result = unweighted if is_same else ClosureResult(weighed, extra=unweighted.extra)
        if result.loss is not None:
            self.has_loss = True
            self._note(result.loss)
        else:
            self.num_skipped += 1
        return result

    def run_schedule(
        self,
        in_hook: Callable[..., Any],
        arguments: tuple[Any, ...],
        batch_idx: int,
        ends_window: bool,
    ) -> ClosureResult:
        """Runs forward and backward by a strategy with its own schedule, after the gradients were zeroed.

        Args:
            in_hook: calls a function; meanwhile `self.log` acts as if it were called in the hook of the given name.
            arguments: arguments of `training_step`.
            batch_idx: index of the batch within the epoch.
            ends_window: whether the optimizer steps after this batch.
        """
        trainer = self.trainer
        strategy: Any = trainer.strategy
        one = torch.ones((), device=strategy.root_device)
        by_samples: Callable[[], Any] = cache(lambda: self.loss_weighting.weigh(one, None, batch_idx))

        def weigh(weight: Any) -> Tensor:
            return (
                by_samples()
                if weight is None
                else self.loss_weighting.as_weight(weight, strategy.root_device, batch_idx)
            )

        loss, weight = in_hook("training_step", strategy.run_schedule, arguments, weigh, ends_window)
        if weight is None:
            loss = loss * by_samples()
        else:
            loss = self.loss_weighting.weigh(loss, {"weight": weight}, batch_idx, is_summed=True)
        # These hooks belong around backward. It is over by now, because the loss was not known earlier.
        trainer.precision_plugin.pre_backward(loss, trainer.lightning_module)
        trainer.precision_plugin.post_backward(loss, trainer.lightning_module)
        strategy.post_backward(loss)
        if ends_window:
            self.loss_weighting.correct()
        self.has_loss = True
        self._note(loss)
        return ClosureResult(loss)

    def _note(self, loss: Tensor) -> None:
        """Has the loss of a micro-batch looked at."""
        if self.step_guard is not None:
            self.step_guard.note_loss(loss)
        self.watch.observe(self.trainer, "loss", loss, self.num_steps)

    def _make_closure(self, kwargs: OrderedDict, optimizer: Optimizer, batch_idx: int) -> Closure:
        # Lightning: _AutomaticOptimization._make_closure
        closure = self._make_weighted_closure(kwargs, optimizer, batch_idx)
        trainer: Any = self.trainer
        some_are_fillers = trainer.data_size > 1 and trainer._data_connector.sizes.some_are_fillers(batch_idx)
        return _ClosureAmongFillers(closure, trainer, batch_idx) if some_are_fillers else closure

    def _make_weighted_closure(self, kwargs: OrderedDict, optimizer: Optimizer, batch_idx: int) -> Closure:
        if self._skip_backward or not self.runs_own_schedule:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        hooks = Hooks(self.trainer)

        def step() -> ClosureResult:
            if zero_grad is not None:
                zero_grad()
            ends_window = not self.trainer.fit_loop._should_accumulate()
            return self.run_schedule(hooks.in_hook, tuple(kwargs.values()), batch_idx, ends_window)

        return Closure(step_fn=step)

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        # Lightning: _AutomaticOptimization._optimizer_step
        step = self.trainer.global_step
        if len(self.trainer.optimizers) == 1:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        else:
            self.optim_progress.optimizer.step.increment_ready()
            self._step_together(batch_idx, train_step_and_backward_closure)
            self.optim_progress.optimizer.step.increment_completed()
        self._observe_norm(self.trainer.precision_plugin, step)

    def _step_together(self, batch_idx: int, closure: Callable[[], Tensor | None]) -> None:
        """Steps several optimizers on one loss: see `several_optimizers.py`."""
        trainer = self.trainer
        shared, epoch = SharedClosure(closure), trainer.current_epoch
        with stepping_together(trainer):
            for wrapped in trainer.strategy._lightning_optimizers:
                own = partial(shared, wrapped.optimizer)
                call._call_lightning_module_hook(trainer, "optimizer_step", epoch, batch_idx, wrapped, own)

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        # Lightning: _AutomaticOptimization._make_zero_grad_fn, of one optimizer
        make = super()._make_zero_grad_fn
        of_each = [zero for one in self.trainer.optimizers if (zero := make(batch_idx, one)) is not None]

        def zero_all() -> None:
            for zero in of_each:
                zero()

        return zero_all if of_each else None

    def _observe_norm(self, plugin: Any, step: int) -> None:
        norm = getattr(plugin, "grad_norm", None)
        if norm is not None and getattr(plugin, "scaler", None) is None:  # loss scaling makes infinite norms by design
            self.watch.observe(self.trainer, "gradient norm", norm, step)

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        # Lightning: _AutomaticOptimization._make_backward_fn
        backward = super()._make_backward_fn(optimizer)
        if backward is None:
            return None

        def backward_and_correct(loss: Tensor) -> None:
            backward(loss)
            if not self.trainer.fit_loop._should_accumulate():
                self.loss_weighting.correct()

        return backward_and_correct


class _TensorResult(ClosureResult):
    """A result that has only a loss; it avoids the cost of the dataclass's constructor."""

    def __init__(self, closure_loss: Tensor | None) -> None:
        assert closure_loss is not None
        self.closure_loss = closure_loss
        self.loss = closure_loss.detach().clone()
        self.extra = {}


class _ClosureAmongFillers(Closure):
    """Runs a batch that some rank has no sample of.

    Args:
        closure: runs the batch.
        trainer: the trainer of the batch.
        batch_idx: within the epoch.
    """

    def __init__(self, closure: Closure, trainer: Any, batch_idx: int) -> None:
        self._result = None
        self._inner, self._trainer, self._batch_idx = closure, trainer, batch_idx

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Forward and backward."""
        sizes = self._trainer._data_connector.sizes
        with beside_fillers(self._trainer, is_filler=sizes.is_filler(self._batch_idx)):
            return self._inner.closure(*args, **kwargs)


class _MicroBatch(Closure):  # Lightning: it raises an error if the optimizer has not called it
    """Forward, zeroing of gradients and backward of one micro-batch."""

    def __init__(
        self,
        optimization: AutomaticOptimization,
        hooks: Hooks,
        shortcuts: Shortcuts,
        optimizer: Optimizer,
        batch_idx: int,
        arguments: tuple[Any, ...],
        ends_window: bool,
    ) -> None:
        self._result = None
        self._optimization = optimization
        self._hooks = hooks
        self._shortcuts = shortcuts
        self._optimizer = optimizer
        self._batch_idx = batch_idx
        self._arguments = arguments
        self._ends_window = ends_window
        self.ran_out_of_memory = False
        """Whether the micro-batch ran out of memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if torch.is_grad_enabled():
            self._result = self.closure()
        else:
            with torch.enable_grad():
                self._result = self.closure()
        if self._ends_window and self._shortcuts.calls_after_closure:
            hooks = self._hooks
            hooks.precision._after_closure(hooks.module, self._optimizer)
        return self._result.loss

    def closure(self) -> ClosureResult:
        """Forward, zeroing of gradients and backward."""
        heartbeat = self._optimization.trainer.heartbeat  # type: ignore[attr-defined]
        heartbeat.phase = "train"
        out_of_memory = self._optimization.out_of_memory
        if out_of_memory is not None:
            result = self._closure_or_recovery(out_of_memory)
        elif self._optimization.loss_weighting.data_size == 1:
            result = self._forward_and_backward()
        else:
            result = self._closure()
        heartbeat.phase = "optimizer"
        return result

    def _closure_or_recovery(self, out_of_memory: OutOfMemory) -> ClosureResult:
        """Runs the closure, and handles running out of memory."""
        out_of_memory.begin_micro_batch()
        result = ClosureResult(None)
        try:
            result = self._closure()
        except RuntimeError as error:
            self.ran_out_of_memory = True
            failure = error
        # Outside of the `except` clause, which would keep the frames, and so the activations, of the failed call.
        if self.ran_out_of_memory:
            out_of_memory.recover(failure, self._step_on_smallest_batch, self._ends_window)
            if self._ends_window:
                self._optimization.loss_weighting.correct()
        if self._ends_window:
            out_of_memory.raise_if_any_failed()
        return result

    def _step_on_smallest_batch(self, training_step: Callable[..., Any]) -> Tensor:
        optimization = self._optimization
        trainer: Any = optimization.trainer
        batch = Transfer(trainer)(trainer._data_connector.sizes.smallest_batch())
        output = self._hooks.in_hook("training_step", training_step, batch, *self._arguments[1:])
        loss = ClosureResult.from_training_step_output(output).closure_loss
        weighed = optimization.loss_weighting.weigh(loss, output, self._batch_idx, is_padding=True)
        assert weighed is not None
        return weighed

    def _closure(self) -> ClosureResult:
        trainer: Any = self._optimization.trainer
        sizes = trainer._data_connector.sizes
        if self._optimization.loss_weighting.data_size == 1 or not sizes.some_are_fillers(self._batch_idx):
            return self._forward_and_backward()
        with beside_fillers(trainer, is_filler=sizes.is_filler(self._batch_idx)):
            return self._forward_and_backward()

    def _forward_and_backward(self) -> ClosureResult:
        # Lightning: Closure.closure
        optimization, hooks, shortcuts = self._optimization, self._hooks, self._shortcuts
        trainer: Any = hooks.trainer
        if optimization.runs_own_schedule and not optimization._skip_backward:
            self._zero_grad_of_all(trainer)
            arguments = hooks.in_hook, self._arguments, self._batch_idx, self._ends_window
            return optimization.run_schedule(*arguments)
        # Lightning: _AutomaticOptimization._training_step
        owner = hooks.module if shortcuts.skips_forward else hooks.strategy  # Lightning: Strategy.training_step
        output = hooks.in_hook("training_step", owner.training_step, *self._arguments)
        result = optimization.weighted_result(output, self._batch_idx)
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        if optimization._skip_backward:  # stochastic weight averaging runs a pass without gradients
            return result
        self._zero_grad_of_all(trainer)
        if result.closure_loss is not None:
            hooks.in_hook("backward", shortcuts.backward, result.closure_loss, self._optimizer)
            if self._ends_window:
                optimization.loss_weighting.correct()
        return result

    def _zero_grad_of_all(self, trainer: Any) -> None:
        if self._batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in self._hooks.strategy.optimizers:
                self._zero_grad(trainer, optimizer)

    def _zero_grad(self, trainer: Any, optimizer: Optimizer) -> None:
        # Lightning: _AutomaticOptimization._on_before_zero_grad and _optimizer_zero_grad
        progress: Any = self._optimization.optim_progress.optimizer.zero_grad
        total, current = progress.total, progress.current
        # Otherwise gradients are only set to None, which takes too little time to be measured.
        is_announced = not self._shortcuts.skips_zero_grad
        if is_announced:
            trainer.heartbeat.phase = "optimizer"
        total.ready += 1
        current.ready += 1
        self._hooks.call("on_before_zero_grad", optimizer)
        total.started += 1
        current.started += 1
        self._shortcuts.zero_grad(self._batch_idx, optimizer)
        total.completed += 1
        current.completed += 1
        if is_announced:
            trainer.heartbeat.phase = "train"
