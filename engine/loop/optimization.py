"""Automatic and manual optimization, with micro-batches that are weighted by their samples: see `loss_weighting.py`.

Lightning divides by `accumulate_grad_batches` throughout, so the last, shorter window of an epoch has gradients that
are too small by that factor, and a short batch counts for as much as a full one.
"""

from collections import OrderedDict
from collections.abc import Callable
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
from ..strategies import capabilities_of, without_sync
from ..strategies.step_guard import StepGuard
from .hooks import Hooks, Shortcuts, Transfer
from .loss_weighting import LossWeighting
from .out_of_memory import OutOfMemory
from .padding_batch import beside_fillers
from .several_optimizers import SharedClosure

__all__ = ["AutomaticOptimization", "ManualOptimization", "check_may_skip"]


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
        backward, num_steps = self._backward, self.optim_step_progress.total.ready
        num_calls = 0 if backward is None else backward.num_calls
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
        if self._guard is not None:
            self._guard.begin_micro_batch()
        sizes = self.trainer._data_connector.sizes  # type: ignore[attr-defined]
        if self._loss_weighting.data_size > 1 and sizes.some_are_fillers(batch_idx):
            with beside_fillers(self.trainer, is_filler=sizes.is_filler(batch_idx)):
                super().advance(kwargs)
        else:
            super().advance(kwargs)
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
