"""Automatic and manual optimization, with micro-batches that are weighted by their samples: see `loss_weighting.py`.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor, and a short batch counts for as much as a full one.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from .._compat.lightning import _AutomaticOptimization, _ManualOptimization
from ..data.exhausted import ends_with_data
from ..precision.loss_scaling import one_update
from ..precision.plugins import stepping_together
from ..reliability.nonfinite import NonFiniteWatch
from ..strategies import without_sync
from ..strategies.step_guard import StepGuard
from .evidence import Evidence
from .hooks import Hooks, Shortcuts, Transfer
from .loss_weighting import LossWeighting
from .out_of_memory import OutOfMemory
from .padding_batch import beside_fillers
from .several_optimizers import SharedClosure

__all__ = ["AutomaticOptimization", "ManualOptimization"]


class AutomaticOptimization(_AutomaticOptimization):  # Lightning: _TrainingEpochLoop.automatic_optimization
    """Lightning's automatic optimization, with weighted micro-batches and a check for losses that are not finite."""

    def __init__(self, trainer: Trainer, watch: NonFiniteWatch) -> None:
        super().__init__(trainer)
        self.watch = watch
        self.loss_weighting = LossWeighting(trainer)
        self.runs_own_schedule = trainer.engine_strategy.capabilities.runs_own_schedule  # type: ignore[attr-defined]
        self.has_between_passes = trainer.engine_strategy.capabilities.has_between_passes  # type: ignore[attr-defined]
        self.out_of_memory: OutOfMemory | None = None
        self._shortcuts: Shortcuts | None = None
        self.has_loss = False
        """Whether `training_step` has returned a loss."""
        self.num_skipped = 0
        """The number of times that `training_step` has returned None."""
        self.keeps_results = False
        """Whether the result of the current micro-batch is kept, which another rank's loss may interrupt."""
        self._result: ClosureResult | None = None
        self.step_guard: StepGuard | None = None
        """Leaves out steps that are not finite; None: none is left out."""
        self.evidence: Evidence | None = None
        """Keeps what repeats a step that is not finite; None: nothing is kept."""

    def __getstate__(self) -> dict[str, Any]:
        # A copied trainer takes part in no run, and methods that a user has replaced may not be pickled.
        return {**vars(self), "_shortcuts": None}

    def begin_epoch(self) -> None:
        """Looks up the values that stay the same for an epoch, which would cost each step several calls."""
        self.trainer._data_connector.sizes.begin_epoch()  # type: ignore[attr-defined]
        self.loss_weighting.begin_epoch()

    def end_run(self) -> None:
        """Forgets what belongs to one run."""
        self._shortcuts = None
        if self.step_guard is not None:
            self.step_guard.close()
            self.step_guard = self.evidence = None

    def run(self, optimizer: Optimizer | None, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Runs one micro-batch, and the optimizer step if it ends a window.

        Args:
            optimizer: as Lightning's loop has it; the strategy's optimizers are stepped.
            batch_idx: index of the micro-batch within the epoch.
            kwargs: arguments of `training_step`, in their order.
        """
        # Lightning: _AutomaticOptimization.run and what it calls; from `optimizer_step` on see `Shortcuts`.
        if self.step_guard is not None:
            self.step_guard.begin_micro_batch()
        if self.evidence is not None:
            begins_step = batch_idx % self.trainer.accumulate_grad_batches == 0
            self.evidence.keep(tuple(kwargs.values()), begins_step=begins_step)
        shortcuts = self._shortcuts
        if shortcuts is None or not shortcuts.is_current():  # a callback may replace any method
            shortcuts = self._shortcuts = Shortcuts(self.trainer)
        hooks = shortcuts.hooks
        optimizers = hooks.strategy.optimizers
        closure = _MicroBatch(self, shortcuts, optimizers, batch_idx, tuple(kwargs.values()))
        if closure.ends_window:
            steps = self.optim_progress.optimizer.step
            num_steps = steps.total.completed
            steps.total.ready += 1
            steps.current.ready += 1
            if len(optimizers) == 1:
                shortcuts.optimizer_step(batch_idx, optimizers[0], closure)
            else:
                self._step_together(batch_idx, closure)
            steps.total.completed += 1
            steps.current.completed += 1
            norm = getattr(hooks.precision, "grad_norm", None)
            # Loss scaling makes infinite norms by design.
            if norm is not None and getattr(hooks.precision, "scaler", None) is None:
                self.watch.observe(self.trainer, "gradient norm", norm, num_steps)
        elif hooks.strategy.handles_gradient_accumulation:  # its own step decides what to do with the gradients
            shortcuts.optimizer_step(batch_idx, optimizers[0], closure)
        else:
            with without_sync(hooks.strategy):
                closure()
        if closure.ran_out_of_memory:
            return {}
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def weighted_result(self, output: Any, batch_idx: int) -> ClosureResult:
        """Returns `training_step`'s result, with a loss that can be added to those of the other micro-batches."""
        trainer = self.trainer
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: the other"
                " ranks wait for this one's gradients. Has it forgotten `return loss`? To skip a batch, return a"
                " loss of zero that depends on the parameters."
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
        if self.keeps_results:
            self._result = ClosureResult(result.loss, extra=result.extra)
        return result

    def end_step_of_others(self) -> dict[str, Any]:
        """Returns what `run` would have: the step has failed here in its last all-reduce, and others have made it."""
        steps, result = self.optim_progress.optimizer.step, self._result
        steps.total.completed += 1
        steps.current.completed += 1
        return {} if result is None or result.loss is None else result.asdict()

    def run_schedule(
        self, hooks: Hooks, arguments: tuple[Any, ...], batch_idx: int, ends_window: bool
    ) -> ClosureResult:
        """Runs forward and backward by a strategy with its own schedule, after the gradients were zeroed.

        Args:
            hooks: hooks of this run.
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

        loss, weight = hooks.in_hook("training_step", strategy.run_schedule, arguments, weigh, ends_window)
        if weight is None:
            loss = loss * by_samples()
        else:
            loss = self.loss_weighting.weigh(loss, {"weight": weight}, batch_idx, is_summed=True)
        # These hooks belong around backward. It is over by now, because the loss was not known earlier.
        with strategy.between_passes() if hooks.has_users("on_before_backward") else nullcontext():
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
        self.watch.observe(self.trainer, "loss", loss, self.optim_progress.optimizer.step.total.completed)

    def _step_together(self, batch_idx: int, closure: Callable[[], Tensor | None]) -> None:
        """Steps several optimizers on one loss: see `several_optimizers.py`."""
        trainer = self.trainer
        shared, epoch = SharedClosure(closure), trainer.current_epoch
        with stepping_together(trainer):
            for wrapped in trainer.strategy._lightning_optimizers:
                own = partial(shared, wrapped.optimizer)
                call._call_lightning_module_hook(trainer, "optimizer_step", epoch, batch_idx, wrapped, own)


class _TensorResult(ClosureResult):
    """A result that has only a loss; it avoids the cost of the dataclass's constructor."""

    def __init__(self, closure_loss: Tensor | None) -> None:
        assert closure_loss is not None
        self.closure_loss = closure_loss
        self.loss = closure_loss.detach().clone()
        self.extra = {}


class _MicroBatch(Closure):  # Lightning: it raises an error if the optimizer has not called it
    """Forward, zeroing of gradients and backward of one micro-batch."""

    def __init__(
        self,
        optimization: AutomaticOptimization,
        shortcuts: Shortcuts,
        optimizers: list[Optimizer],
        batch_idx: int,
        arguments: tuple[Any, ...],
    ) -> None:
        self._result = None
        self._optimization = optimization
        self._optimizers = optimizers
        self._batch_idx = batch_idx
        self._arguments = arguments
        self._shortcuts = shortcuts
        self._hooks = shortcuts.hooks
        self.ends_window = not optimization.trainer.fit_loop.epoch_loop._should_accumulate()
        """Whether the optimizer steps after this micro-batch."""
        self.ran_out_of_memory = False
        """Whether the micro-batch ran out of memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if torch.is_grad_enabled():
            self._result = self.closure()
        else:
            with torch.enable_grad():
                self._result = self.closure()
        if self.ends_window and self._shortcuts.calls_after_closure:
            hooks = self._hooks
            hooks.precision._after_closure(hooks.module, self._optimizers[0])
        return self._result.loss

    def closure(self) -> ClosureResult:
        """Forward, zeroing of gradients and backward."""
        optimization = self._optimization
        heartbeat = optimization.trainer.heartbeat  # type: ignore[attr-defined]
        heartbeat.phase = "train"
        if optimization.out_of_memory is not None:
            result = self._closure_or_recovery(optimization.out_of_memory)
        elif optimization.loss_weighting.data_size > 1:
            result = self._beside_fillers()
        else:
            result = self._forward_and_backward()
        heartbeat.phase = "optimizer"
        return result

    def _closure_or_recovery(self, out_of_memory: OutOfMemory) -> ClosureResult:
        """Runs the closure, and handles running out of memory."""
        out_of_memory.begin_micro_batch()
        result = ClosureResult(None)
        try:
            result = self._beside_fillers()
        except RuntimeError as error:
            self.ran_out_of_memory = True
            failure = error
        # Outside of the `except` clause, which would keep the frames, and so the activations, of the failed call.
        if self.ran_out_of_memory:
            out_of_memory.finish_micro_batch(failure, self._step_on_smallest_batch, self.ends_window)
            if self.ends_window:
                self._optimization.loss_weighting.correct()
        if self.ends_window:
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

    def _beside_fillers(self) -> ClosureResult:
        trainer: Any = self._optimization.trainer
        sizes = trainer._data_connector.sizes
        if self._optimization.loss_weighting.data_size == 1 or not sizes.some_are_fillers(self._batch_idx):
            return self._forward_and_backward()
        with beside_fillers(trainer, is_filler=sizes.is_filler(self._batch_idx)):
            return self._forward_and_backward()

    def _forward_and_backward(self) -> ClosureResult:
        # Lightning: Closure.closure
        optimization, trainer = self._optimization, self._hooks.trainer
        zero_grad = self._zero_grad_between_passes if optimization.has_between_passes else self._zero_grad
        if optimization.runs_own_schedule and not optimization._skip_backward:
            zero_grad(trainer)
            return optimization.run_schedule(self._hooks, self._arguments, self._batch_idx, self.ends_window)
        output = self._shortcuts.training_step(*self._arguments)
        result = optimization.weighted_result(output, self._batch_idx)
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        if optimization._skip_backward:  # stochastic weight averaging runs a pass without gradients
            return result
        zero_grad(trainer)
        if result.closure_loss is not None:
            self._hooks.in_hook("backward", self._shortcuts.backward, result.closure_loss, self._optimizers[0])
            if self.ends_window:
                optimization.loss_weighting.correct()
        return result

    def _zero_grad_between_passes(self, trainer: Any) -> None:
        """Zeroes the gradients in the strategy's context of hooks between forward and backward, if there are any."""
        names = ("on_before_zero_grad", "on_before_backward")
        is_users = any(getattr(o.zero_grad, "__func__", None) is not Optimizer.zero_grad for o in self._optimizers)
        if is_users or not self._shortcuts.skips_zero_grad or any(map(self._hooks.has_users, names)):
            with self._hooks.strategy.between_passes():
                self._zero_grad(trainer)
        else:
            self._zero_grad(trainer)

    def _zero_grad(self, trainer: Any) -> None:
        """Zeroes the gradients of all optimizers, if a window begins."""
        # Lightning: _AutomaticOptimization._on_before_zero_grad and _optimizer_zero_grad
        if self._batch_idx % trainer.accumulate_grad_batches:
            return
        progress: Any = self._optimization.optim_progress.optimizer.zero_grad
        total, current = progress.total, progress.current
        # Otherwise gradients are only set to None, which takes too little time to be measured.
        is_announced = not self._shortcuts.skips_zero_grad
        if is_announced:
            trainer.heartbeat.phase = "optimizer"
        for optimizer in self._optimizers:
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


# Manual optimization, in which the loss of a backward is weighted by the samples of the rank's batch.
#
# Strategies average the ranks' gradients. If ranks have unequal parts of a batch, as in the last one of an epoch, the
# mean over all samples needs a weight for each rank's loss: see `loss_weighting.py` for automatic optimization. A rank
# without a sample of the batch runs a padding batch for its collectives: its losses count for nothing.
#
# A module may call backward and step in `training_step`, and in the hooks of a batch as well: from the first batch of a
# run until its end, losses are weighted and steps are counted, where Lightning counts those of `training_step` only.


class ManualOptimization(_ManualOptimization):  # Lightning: _TrainingEpochLoop.manual_optimization
    """Lightning's manual optimization, with losses that are weighted by samples.

    Args:
        trainer: the trainer of the loop.
        loss_weighting: knows the samples of each rank.
    """

    def __init__(self, trainer: Trainer, loss_weighting: LossWeighting) -> None:
        super().__init__(trainer)
        self._loss_weighting = loss_weighting
        self._backward: _Backward | None = None
        self._users_backward: Any = None
        self._has_warned = False

    def begin_epoch(self) -> None:
        """Makes steps count, and `manual_backward` weigh losses of several ranks and look at them, until `teardown`."""
        self.on_run_start()
        if self._backward is None and (self._loss_weighting.data_size > 1 or self._guard is not None):
            strategy: Any = self.trainer.strategy
            self._users_backward = vars(strategy).get("backward")  # the user may have set one on the object
            # Lightning: LightningModule.manual_backward calls it
            self._backward = vars(strategy)["backward"] = _Backward(strategy.backward, self._factor, self._guard)

    @property
    def _guard(self) -> StepGuard | None:
        return self.trainer.fit_loop.epoch_loop.automatic_optimization.step_guard  # type: ignore[attr-defined]

    def _factor(self) -> float:
        """The weight of a loss of this rank's current batch."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        progress = epoch_loop.batch_progress.current
        is_in_batch = progress.ready > progress.completed
        return self._loss_weighting.factor_of_batch(epoch_loop.batch_idx) if is_in_batch else 1.0

    def run(self, kwargs: OrderedDict) -> Any:
        """Runs `training_step`; a loss scaler updates its scale once, after the last optimizer's step."""
        with one_update(self.trainer):
            return super().run(kwargs)

    @ends_with_data
    def advance(self, kwargs: OrderedDict) -> None:
        """Runs `training_step`."""
        self.trainer.heartbeat.phase = "train"  # type: ignore[attr-defined]
        backward, num_steps = self._backward, self.optim_step_progress.total.ready
        num_calls = 0 if backward is None else backward.num_calls
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
        if self._guard is not None:
            self._guard.begin_micro_batch()
        evidence = self.trainer.fit_loop.epoch_loop.automatic_optimization.evidence  # type: ignore[attr-defined]
        if evidence is not None:
            evidence.keep(tuple(kwargs.values()), begins_step=True)
        sizes = self.trainer._data_connector.sizes  # type: ignore[attr-defined]
        if self._loss_weighting.data_size > 1 and sizes.some_are_fillers(batch_idx):
            with beside_fillers(self.trainer, is_filler=sizes.is_filler(batch_idx)):
                super().advance(kwargs)
        else:
            super().advance(kwargs)
        if self.trainer.accumulate_grad_batches > 1 and self.optim_step_progress.total.ready > num_steps:
            self._check_global_batch(batch_idx, sizes)
        if (
            backward is not None
            and backward.num_calls == num_calls
            and self.optim_step_progress.total.ready > num_steps
            and not self._has_warned
            and self._factor() != 1
        ):
            self._has_warned = True
            rank_zero_warn(
                f"The ranks have unequal numbers of samples of batch {batch_idx}, and"
                " their gradients count as if they had equally many, since `training_step` called loss.backward(): call"
                " self.manual_backward(loss), which weighs the loss by its samples, or give the DataLoader"
                " drop_last=True."
            )

    def _check_global_batch(self, batch_idx: int, sizes: Any) -> None:
        """Checks that an optimizer has stepped at the end of a global batch that is cut into micro-batches.

        Raises:
            ValueError: it has stepped before.
        """
        epoch_loop, per_step = self.trainer.fit_loop.epoch_loop, self.trainer.accumulate_grad_batches
        if (batch_idx + 1) % per_step and not epoch_loop.batch_progress.is_last_batch:
            raise ValueError(
                f"{type(self.trainer.lightning_module).__name__} optimizes by hand and has stepped after a part of"
                f" global_batch_size={sizes.global_batch_size}, which is {per_step} batches of each rank: set"
                f" micro_batch_size={sizes.share}, the whole share of a rank, or step at every {per_step}th batch."
            )

    def on_run_end(self) -> dict[str, Any]:
        """Returns the outputs of `training_step`; steps count until `teardown`."""
        output, self._output = self._output, {}
        return output

    def teardown(self) -> None:
        """Removes what `begin_epoch` has set."""
        # Lightning: _ManualOptimization.on_run_end
        for optimizer in self.trainer.strategy._lightning_optimizers:
            optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
        if self._backward is None:
            return
        own = vars(self.trainer.strategy)
        if own.pop("backward", None) is not None and self._users_backward is not None:
            own["backward"] = self._users_backward
        self._backward = self._users_backward = None


class _Backward:
    """Replaces a strategy's `backward`: multiplies the loss by a factor, and has it looked at."""

    def __init__(self, backward: Callable[..., Tensor], factor: Callable[[], float], guard: StepGuard | None) -> None:
        self._backward, self._factor, self._guard = backward, factor, guard
        self.num_calls = 0

    def __call__(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        if self._guard is not None:
            self._guard.note_loss(closure_loss)
        factor = self._factor()
        return self._backward(closure_loss if factor == 1 else closure_loss * factor, *args, **kwargs)
