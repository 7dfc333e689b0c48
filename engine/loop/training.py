"""The loop of training epochs: each runs in a short, flat loop that calls only what is overridden.

Epochs that need more run in Lightning's own loop (see `_why_not_flat`), and so does the first batch after a resumption.
"""

import logging
import warnings
from time import perf_counter
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

# Lightning: the parts of Trainer.fit_loop.epoch_loop.
# Lightning: what fetches the batches of Trainer.fit_loop.epoch_loop.
from .._compat.lightning import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _MaxSizeCycle,
    _PrefetchDataFetcher,
    _TrainingEpochLoop,
)
from ..checkpoint import get_random_state
from ..data.exhausted import ends_with_data
from ..reliability.nonfinite import NonFiniteWatch
from ..strategies import adapt, capabilities_of, differing_buffers
from ..strategies.averages import end_averages
from ..strategies.step_guard import StepGuard
from .averaged_gradients import AveragedGradients
from .evaluation import EvaluationLoop
from .first_steps import FirstSteps
from .garbage import GarbageCollection
from .hooks import Hooks, Shortcuts, Transfer, overridden
from .log import attach_log, detach_log
from .metrics import agreed_value
from .optimization import AutomaticOptimization, ManualOptimization, check_may_skip
from .out_of_memory import OutOfMemory, RetryStep

__all__ = ["TrainingEpochLoop", "fetch"]

log = logging.getLogger("polyphase.engine")


class TrainingEpochLoop(_TrainingEpochLoop):  # Lightning: Trainer.fit_loop.epoch_loop
    """Lightning's training epoch, with a flat loop for the usual case."""

    automatic_optimization: AutomaticOptimization
    manual_optimization: ManualOptimization
    first_steps: FirstSteps
    averaged_gradients: AveragedGradients | None = None
    """Checks the gradients of a run in which each rank steps with averages of whole gradients; None in other runs."""
    _logged_reason: str | None = None
    data_wait_s: float | None = 0.0
    """Seconds that training has waited for batches; None after an epoch in Lightning's own loop, which has no count."""
    pending_batch_work: Literal["end", "nothing"] | None = None
    """Work that the interrupted run left for its last batch: ``"end"``, all work after the batch; None if unknown."""
    is_between_steps = False
    rng_state_before_validation: dict[str, Any] | None = None
    _batches_at_step = 0
    _marked_step = 0
    _rng_state_at_step: dict[str, Any] | None = None

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int, watch: NonFiniteWatch) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = AutomaticOptimization(trainer, watch)
        self.buffer_check = _BufferCheck(trainer)
        self.garbage = GarbageCollection()
        self.manual_optimization = ManualOptimization(trainer, self.automatic_optimization.loss_weighting)
        self.val_loop = EvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Runs one epoch."""
        watch = self.automatic_optimization.watch
        self.trainer.heartbeat.phase = "train"  # type: ignore[attr-defined]
        watch.begin_epoch(self.trainer)
        with self.first_steps.checking():
            self._run(data_fetcher)
        self.buffer_check.compare()
        adapt(self.trainer.strategy).sync_weights()
        watch.end_epoch(self.trainer)

    def _run(self, data_fetcher: _DataFetcher) -> None:
        reason = _why_not_flat(self.trainer, data_fetcher)
        if reason is not None:
            if self.automatic_optimization.out_of_memory is not None:
                raise ValueError(
                    f"micro_batch_size='auto' can't repeat a step that is done with {reason}: give a number."
                )
            if reason != self._logged_reason:
                log.debug("epochs run in Lightning's own loop, because of %s", reason)
            self._logged_reason = reason
            self.data_wait_s = None
            super().run(data_fetcher)
            return
        self.reset()
        self.on_run_start(data_fetcher)
        trainer: Any = self.trainer
        attach_log(trainer.lightning_module, trainer._logger_connector)
        epoch = _FlatEpoch(self, data_fetcher)
        try:
            if self._advance_resumed(data_fetcher):
                with self.garbage.at_same_batches(trainer.strategy.root_device):
                    while not epoch.is_done() and epoch.advance():
                        pass
        finally:
            trainer.heartbeat.phase = "train"
            epoch.close()
            detach_log(trainer.lightning_module)

    def _advance_resumed(self, data_fetcher: _DataFetcher) -> bool:
        """Runs the first batch after a resumption in Lightning's loop, which knows what of it is done.

        Returns False if the epoch is over.
        """
        if self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint:
            try:
                if not self.done and not self._begins_epoch:
                    self.advance(data_fetcher)
                    self.on_advance_end(data_fetcher)
            except StopIteration:
                return False
            finally:
                self.on_iteration_done()
        self.val_loop.restarting = False
        return True

    @property
    def done(self) -> bool:
        """Whether the epoch is over."""
        return super().done and self.pending_batch_work != "end"

    @ends_with_data
    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Runs one batch in Lightning's own loop."""
        if self.pending_batch_work == "end":
            self.pending_batch_work = None
            return
        try:
            super().advance(data_fetcher)
        except StopIteration:
            progress: Any = self.batch_progress
            if progress.current.started < progress.current.ready:  # otherwise the data is over
                self.trainer.steering.cancel_epoch(progress.total.ready)  # type: ignore[attr-defined]
            raise

    def reset(self) -> None:
        """Resets the loop at the start of each epoch; hides Lightning's warning if the data's position is known."""
        with warnings.catch_warnings():
            if self.restarting and self.trainer._checkpoint_connector.knows_data_position:  # type: ignore[attr-defined]
                # Lightning warns of every loader without a state_dict, but this one resumes at its position.
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepares the epoch; called when its iterator exists."""
        data: Any = self.trainer._data_connector
        if not self.restarting and not self.trainer.fit_loop.is_resuming:
            data.data_position.begin_next_epoch()
        elif self._begins_epoch:
            data.data_position.data_epochs.restart_changed_streams(data_fetcher, data.data_position.epoch)
            self._begin_new_loaders(data_fetcher)
        super().on_run_start(data_fetcher)
        self.trainer._checkpoint_connector.restore_random_state()  # type: ignore[attr-defined]
        data.data_position.restore_states()
        self.automatic_optimization.begin_epoch()
        self._begin_optimization()
        self._mark_step(self.global_step)
        self.is_between_steps = False
        if self.pending_batch_work == "nothing":
            self.pending_batch_work = None
            self.restarting = False  # Lightning: would repeat the work after the batch

    def _begin_optimization(self) -> None:
        trainer = self.trainer
        averages = capabilities_of(trainer.strategy).averages_whole_gradients and trainer.world_size > 1
        if averages and self.averaged_gradients is None:
            self.averaged_gradients = AveragedGradients(trainer)
        optimization = self.automatic_optimization
        watch = optimization.watch
        if watch.guards_steps and not trainer.strategy.handles_gradient_accumulation:
            if optimization.step_guard is None:
                reads = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
                is_last = watch.policy == "error"
                optimization.step_guard = StepGuard(trainer, self._judged, stays=is_last, reads=reads)
            optimization.step_guard.attach()
        if not trainer.lightning_module.automatic_optimization:
            self.manual_optimization.begin_epoch()

    def _judged(self, flag: Any) -> None:
        """Called with the flag of each step of an optimizer, see `StepGuard`."""
        trainer = self.trainer
        if not isinstance(flag, Tensor) and flag > 0:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    # Lightning: where it looks whether there was a step, after which it counts the weights once more.
                    callback._latest_update_step = trainer.global_step + 1
        self.automatic_optimization.watch.judge(trainer, flag, trainer.global_step, self.batch_idx)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Steps the schedulers; after a step that the host knows to be left out on all ranks, those of steps wait."""
        guard = self.automatic_optimization.step_guard
        is_left_out = guard is not None and guard.verdict is True
        if not (interval == "step" and is_left_out and adapt(self.trainer.strategy).averages_gradients):
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _get_monitor_value(self, key: str) -> Any:
        # Lightning: _TrainingEpochLoop._update_learning_rates reads the metric of a ReduceLROnPlateau here.
        return agreed_value(self.trainer, key, super()._get_monitor_value(key))

    def _begin_new_loaders(self, data_fetcher: _DataFetcher) -> None:
        """Creates the second iterator of loaders that are new in this epoch, with the random draws of the first one."""
        fit_loop: Any = self.trainer.fit_loop
        is_second, fit_loop.begins_with_new_loaders = fit_loop.begins_with_new_loaders, False
        if is_second and self.trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start
            self.trainer._checkpoint_connector.restore_random_state()  # type: ignore[attr-defined]
            self.trainer._data_connector.data_position.restore_states()  # type: ignore[attr-defined]
            self.trainer._data_connector.data_position.restart_loaders()  # type: ignore[attr-defined]
            iter(data_fetcher)

    @property
    def _begins_epoch(self) -> bool:
        # Lightning: zero batches count as a multiple of val_check_interval, so the validation loaders would draw.
        return self.batch_progress.current.ready == 0 and self.trainer._checkpoint_connector.knows_data_position  # type: ignore[attr-defined]

    def _mark_step(self, num_steps: int) -> None:
        self._batches_at_step, self._marked_step = self.batch_progress.current.ready, num_steps
        if self.trainer.accumulate_grad_batches > 1:
            self._rng_state_at_step = get_random_state()
            self.trainer._data_connector.data_position.draws.mark_step()  # type: ignore[attr-defined]

    @property
    def rng_state_of_window(self) -> dict[str, Any] | None:
        """The random state at the start of an unfinished window, which a resumed run repeats; None outside of one."""
        return self._rng_state_at_step if self.is_in_window else None

    @property
    def is_in_window(self) -> bool:
        """Whether there are batches that no optimizer step has used."""
        return self.trainer.accumulate_grad_batches > 1 and self.batches_done() < self.batch_progress.current.ready

    def batches_done(self) -> int:
        """Returns the number of this epoch's batches that optimizer steps have used, without an unfinished window."""
        progress: Any = self.batch_progress.current
        if not self.trainer.lightning_module.automatic_optimization:
            return progress.processed
        return progress.ready if self.global_step > self._marked_step else self._batches_at_step

    def _broadcast_sigterm_tensor(self) -> None:
        # Lightning: _TrainingEpochLoop._broadcast_sigterm_tensor, which its own loop calls before each batch.
        pass

    @ends_with_data
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Ends a batch in Lightning's own loop."""
        self.trainer.steering.after_batch(self.batch_progress.total.ready)  # type: ignore[attr-defined]
        super().on_advance_end(data_fetcher)
        self.rng_state_before_validation = None
        if not self._should_accumulate():
            self.end_step(self.global_step)  # counts steps of manual optimization, too

    def end_step(self, num_steps: int) -> None:
        """Ends an optimizer step: stops if all ranks have agreed to, and saves a snapshot if one is due."""
        self._mark_step(num_steps)
        if self.averaged_gradients is not None and self.averaged_gradients.compares_weights:
            self.averaged_gradients.end_step()
        if self.first_steps.is_due:
            self.first_steps.end_step()
        if self.buffer_check.is_first_step_due:
            self.buffer_check.after_first_step()
        self.is_between_steps = True
        signals: Any = self.trainer._signal_connector
        signals.poll(self.batch_progress.total.ready)
        # If training is over, the fit loop stops instead, after the hooks at the end of the epoch.
        if signals.received_sigterm and not self._is_training_done:
            raise SIGTERMException
        is_requested = signals.snapshot_due(self.batch_progress.total.ready) if signals.requeues else None
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            on_train_step_end = getattr(callback, "on_train_step_end", None)
            if on_train_step_end is not None:
                if is_requested is None:
                    is_requested = signals.snapshot_due(self.batch_progress.total.ready)
                on_train_step_end(self.trainer, self.trainer.lightning_module, is_requested)
        self.is_between_steps = False

    def teardown(self) -> None:
        """Ends the loop, and removes the hooks of optimizers; also called for an interrupted run."""
        self.manual_optimization.teardown()
        if self.averaged_gradients is not None:
            self.averaged_gradients.close()
            self.averaged_gradients = None
        if self.automatic_optimization.step_guard is not None:
            self.automatic_optimization.step_guard.close()
            self.automatic_optimization.step_guard = None
        end_averages(self.trainer)
        super().teardown()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        # Lightning: _TrainingEpochLoop._should_check_val_fx, called right before a validation.
        is_due = super()._should_check_val_fx(data_fetcher)
        if is_due:
            self.rng_state_before_validation = get_random_state()
        return is_due


TrainingEpochLoop.__name__ = _TrainingEpochLoop.__name__  # the name of its entries in a profile


def _why_not_flat(trainer: Trainer, fetcher: _DataFetcher | None) -> str | None:
    """Returns the reason why an epoch must run in Lightning's own loop; None if it can run flat."""
    if not isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
        return "a profiler, which times every call"
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        return "a `dataloader_iter` argument"
    if not trainer.lightning_module.automatic_optimization:
        return "manual optimization"
    if trainer.strategy.handles_gradient_accumulation:
        return f"{type(trainer.strategy).__name__}, which accumulates gradients itself"
    return None


# --- the check of buffers
# Warns once of buffers that each rank updates by its own samples: rank 0's would be evaluated and saved.


class _BufferCheck:
    """Compares the floating-point buffers of the ranks after a run's first step, and after each epoch until it warns.

    Costs a gather between hosts, and a read of the device, each time; nothing for a module without such buffers.

    Args:
        trainer: the trainer of the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._has_warned = False
        self.is_first_step_due = True
        """Whether no step of this run was looked at."""

    def begin_run(self) -> None:
        """Begins a run, whose first step is looked at."""
        self._has_warned, self.is_first_step_due = False, True

    def after_first_step(self) -> None:
        """Compares the buffers after a run's first step."""
        self.is_first_step_due = False
        self.compare()

    def compare(self) -> None:
        """Compares the buffers; all ranks call it after the same step."""
        trainer = self._trainer
        strategy = adapt(trainer.strategy)
        if self._has_warned or trainer.data_size == 1 or strategy.averages_buffers:
            return
        if not strategy.capabilities.keeps_step:  # the ranks are at different steps
            return
        names = differing_buffers(trainer.lightning_module, trainer.data_ranks)
        if trainer.data_size != trainer.world_size:  # pipeline stages have different buffers
            names = sorted({name for of_rank in trainer.all_ranks.all_gather_object(names) for name in of_rank})
        if not names:
            return
        self._has_warned = True
        option = strategy.option_to_average_buffers
        remedy = (
            f", or set {option}, which averages floating-point buffers after each step" if option is not None else ""
        )
        rank_zero_warn(
            f"Under {strategy!r} the ranks have different values of {', '.join(map(repr, names))}: the module updates"
            " these buffers by the samples of its own rank, and rank 0's values are evaluated and saved, so the result"
            " is not that of one process. Reduce what they are made of over the ranks in the module"
            f" (torch.distributed.all_reduce){remedy}."
        )


# The flat loop of a training epoch (fetch, transfer, step, log, validate), which calls only what the run uses.
#
# The order is the one of Lightning's documentation: fetch, transfer, `on_train_batch_start`, optimization
# (`optimization.py`), learning-rate schedulers, `on_train_batch_end`, logging, validation.


def fetch(fetcher: _DataFetcher) -> Any:
    """Returns the next batch of a training fetcher.

    Raises:
        StopIteration: there is none.
    """
    # Lightning: _PrefetchDataFetcher.__next__, _DataFetcher.__next__, CombinedLoader.__next__ and
    # _MaxSizeCycle.__next__. For a single loader, the usual case, all four only count; if its length is not known, they
    # look one batch ahead.
    combined: Any = fetcher._combined_loader
    cycle = combined._iterator
    if (
        type(fetcher) is not _PrefetchDataFetcher
        or fetcher.done
        or (fetcher.length is None and not fetcher.batches)
        or type(cycle) is not _MaxSizeCycle
        or combined._iterables is not combined._flattened[0]  # a collection of loaders
    ):
        return next(fetcher)[0]
    earlier = [] if fetcher.length is not None else [fetcher.batches.pop(0)[0]]
    try:
        batch = next(cycle.iterators[0])
    except StopIteration:
        cycle._consumed[0] = True
        fetcher.done = not fetcher.batches
        if not earlier:
            raise
        return earlier[0]
    index, cycle._idx = cycle._idx, cycle._idx + 1
    fetcher.fetched += 1
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch
    fetcher.batches.append((batch, index, 0))
    return earlier[0]


_CANCELLED: Any = object()
"""Stands for the outputs of a batch whose `on_train_batch_start` returned -1, which ends the epoch."""


class _FlatEpoch:
    """The flat loop of one epoch."""

    def __init__(self, loop: Any, fetcher: _DataFetcher) -> None:
        trainer: Any = loop.trainer
        self._loop = loop
        self._trainer = trainer
        self._fetcher = fetcher
        self._fit_loop = trainer.fit_loop
        self._heartbeat = trainer.heartbeat
        self._connector = trainer._logger_connector
        self._steering = trainer.steering if trainer.world_size > 1 else None
        self._hooks = Hooks(trainer)
        self._transfer = Transfer(trainer)
        self._strategy_hook = overridden(trainer.strategy, Strategy, "on_train_batch_start")
        self._derive_shortcuts()
        self._out_of_memory: OutOfMemory | None = loop.automatic_optimization.out_of_memory
        self._precision: Any = trainer.precision_plugin
        self._precision.hooks = self._hooks

    def _derive_shortcuts(self) -> None:
        trainer = self._trainer
        self._shortcuts = Shortcuts(self._hooks)
        self._has_idx = is_param_in_hook_signature(trainer.lightning_module.training_step, "batch_idx", min_args=2)

    def close(self) -> None:
        """Detaches the hooks from the precision plugin."""
        del self._precision.hooks

    def is_done(self) -> bool:
        """Whether the epoch is over."""
        # Lightning: _TrainingEpochLoop.done
        loop = self._loop
        progress = loop.batch_progress
        if progress.is_last_batch or progress.current.ready == self._fit_loop.max_batches or self._trainer.should_stop:
            return loop.done
        return loop.max_steps != -1 and loop.automatic_optimization.num_steps >= loop.max_steps

    def advance(self) -> bool:
        """Trains on one batch: fetch, copy, `on_train_batch_start`, optimization, then `_end_batch`.

        Each phase of a usual batch is one call, since calls in Python are a large part of the loop's time. Returns
        False if the epoch is over, because the data has ended or `on_train_batch_start` returned -1.
        """
        # Lightning: _TrainingEpochLoop.advance
        trainer, loop = self._trainer, self._loop
        progress: Any = loop.batch_progress
        total, current = progress.total, progress.current
        batch_idx = current.ready
        out_of_memory = self._out_of_memory
        if out_of_memory is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            out_of_memory.begin_step(loop)

        self._heartbeat.phase = "fetch"
        start_s = perf_counter()
        try:
            batch = fetch(self._fetcher)
        except StopIteration:
            return False
        if loop.data_wait_s is not None:
            loop.data_wait_s += perf_counter() - start_s
        if out_of_memory is not None and out_of_memory.has_failed:
            batch = trainer._data_connector.sizes.smallest_batch()
        progress.is_last_batch = self._fetcher.done
        if not self._transfer.is_current():
            self._transfer = Transfer(trainer)
        if not self._transfer.is_there(batch):
            self._heartbeat.phase = "copy"
            batch = self._transfer(batch)
        self._heartbeat.phase = "batch"
        total.ready += 1
        current.ready += 1
        self._connector.begin_batch(loop._results, batch)
        is_last = progress.is_last_batch or current.ready == self._fit_loop.max_batches
        ends_window = is_last or current.ready % trainer.accumulate_grad_batches == 0

        try:
            outputs = self._optimize(batch, batch_idx, ends_window)
        except RetryStep:
            self._retry_step()
            return True
        if outputs is _CANCELLED:
            progress.is_last_batch = is_last = True
        total.processed += 1
        current.processed += 1
        return self._end_batch(outputs, batch, batch_idx, is_last, ends_window)

    def _optimize(self, batch: Any, batch_idx: int, ends_window: bool) -> Any:
        """Runs `on_train_batch_start` and the optimization; returns the outputs, or `_CANCELLED`."""
        loop = self._loop
        if batch is None:
            check_may_skip(self._trainer, batch_idx)
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None
        response = self._hooks.call("on_train_batch_start", batch, batch_idx)
        if self._strategy_hook is not None:
            self._hooks.in_hook("on_train_batch_start", self._strategy_hook, batch, batch_idx)
        if not self._shortcuts.is_current():
            self._derive_shortcuts()
        if response == -1:
            if self._steering is not None:
                self._steering.cancel_epoch(loop.batch_progress.total.ready)
            return _CANCELLED
        progress: Any = loop.batch_progress
        progress.total.started += 1
        progress.current.started += 1
        arguments = (batch, batch_idx) if self._has_idx else (batch,)
        return loop.automatic_optimization.run_flat(self._hooks, self._shortcuts, batch_idx, arguments, ends_window)

    def _retry_step(self) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        assert self._out_of_memory is not None
        self._out_of_memory.repeat(self._loop)
        detach_log(module)  # it refers to logged values that were dropped
        attach_log(module, trainer._logger_connector)

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int, is_last: bool, ends_window: bool) -> bool:
        """Ends a batch: schedulers, `on_train_batch_end`, logging, validation, schedulers of its metrics, signals.

        Returns whether the epoch goes on, unless all its batches are done.
        """
        trainer, loop, connector = self._trainer, self._loop, self._connector
        # Lightning: _TrainingEpochLoop.advance, after the optimization
        has_schedulers = bool(self._hooks.strategy.lr_scheduler_configs)
        if has_schedulers:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if is_last:
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if outputs is _CANCELLED:
            return False
        self._hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        connector.end_batch()
        progress = loop.batch_progress
        progress.total.completed += 1
        progress.current.completed += 1
        if self._steering is not None:
            self._steering.after_batch(progress.total.ready)

        interval = trainer.log_every_n_steps
        # Lightning: _LoggerConnector.should_update_logs
        is_logged = interval and ((loop._batches_that_stepped + 1) % interval == 0 or trainer.should_stop)
        if ends_window and (is_logged or trainer.fast_dev_run):
            self._heartbeat.phase = "log"
            connector.log_metrics(connector.metrics["log"])
            self._heartbeat.phase = "batch"

        # Lightning: _TrainingEpochLoop.on_advance_end
        if is_last or trainer.should_stop or self._may_validate():
            self._validate(ends_window)
        if has_schedulers:
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if ends_window:
            loop._batches_that_stepped += 1
        if trainer.should_stop:
            loop._save_loggers_on_train_batch_end()
        if ends_window:
            loop.end_step(loop.automatic_optimization.num_steps)
        if progress.total.ready >= loop.garbage.due:
            loop.garbage.collect(progress.total.ready)
        return True

    def _may_validate(self) -> bool:
        """Whether validation may be due after this batch; if so, Lightning's own condition decides."""
        interval = self._trainer.val_check_batch
        if interval == float("inf") and self._trainer._val_check_time_interval is None:  # at the end of the data
            return isinstance(self._trainer.limit_train_batches, int)
        if self._trainer._val_check_time_interval is not None or not isinstance(interval, int):
            return True
        progress = self._loop.batch_progress
        return progress.total.ready % interval == 0 or progress.current.ready % interval == 0

    def _validate(self, ends_window: bool) -> None:
        trainer, loop, connector = self._trainer, self._loop, self._connector
        if not loop._should_check_val_fx(self._fetcher):
            return
        connector.collect()  # so that the batch's logged values can be read during the validation
        first_loop_iter = connector._first_loop_iter
        trainer.validating = True
        if ends_window:
            self._hooks.in_hook("on_validation_model_zero_grad", trainer.lightning_module.on_validation_model_zero_grad)
        with loop.garbage.automatic():
            loop.val_loop.run()
        trainer.training = True
        loop.rng_state_before_validation = None
        connector._first_loop_iter = first_loop_iter
