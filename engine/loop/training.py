"""The training epoch as a short, flat loop, which calls only what the run uses.

The order is the one of Lightning's documentation: fetch, transfer, `on_train_batch_start`, optimization
(`optimization.py`), learning-rate schedulers, `on_train_batch_end`, logging, validation. Epochs that need more run in
Lightning's own loop (see `why_not_flat`), and so does the first batch after a resumption.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

# Lightning: the parts of Trainer.fit_loop.epoch_loop.
from .._compat.lightning import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _MaxSizeCycle,
    _PrefetchDataFetcher,
    _TrainingEpochLoop,
)
from ..checkpoint import get_random_state
from ..reliability.nonfinite import NonFiniteWatch
from ..strategies import adapt
from .evaluation import EvaluationLoop
from .first_steps import FirstSteps
from .hooks import Hooks, overridden
from .log import attach_log, detach_log
from .optimization import AutomaticOptimization, check_may_skip
from .out_of_memory import OutOfMemory, RetryStep
from .shortcuts import Shortcuts
from .transfer import Transfer

__all__ = ["TrainingEpochLoop", "fetch", "why_not_flat"]

log = logging.getLogger("polyphase.engine")


class TrainingEpochLoop(_TrainingEpochLoop):  # Lightning: Trainer.fit_loop.epoch_loop
    """Lightning's training epoch, with a flat loop for the usual case."""

    automatic_optimization: AutomaticOptimization
    first_steps: FirstSteps
    _announced: str | None = None
    data_wait_s: float | None = 0.0
    """Seconds that training has waited for batches; None after an epoch in Lightning's own loop, which has no count."""
    pending_batch_work: Literal["end", "nothing"] | None = None
    """The work that remains for the interrupted run's last batch: ``"end"``, all that follows it; None: unknown."""
    is_between_steps = False
    random_before_validation: dict[str, Any] | None = None
    _batches_at_step = 0
    _steps = 0
    _random_at_step: dict[str, Any] | None = None
    _on_train_step_end: Sequence[Callable[..., None]] = ()

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int, watch: NonFiniteWatch) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = AutomaticOptimization(trainer, watch)
        self.val_loop = EvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Runs one epoch."""
        watch = self.automatic_optimization.watch
        self.trainer.heartbeat.phase = "train"  # type: ignore[attr-defined]
        watch.begin_epoch(self.trainer)
        with self.first_steps.watched():
            self._run(data_fetcher)
        adapt(self.trainer.strategy).sync_weights()
        watch.end_epoch(self.trainer)

    def _run(self, data_fetcher: _DataFetcher) -> None:
        reason = why_not_flat(self.trainer, data_fetcher)
        if reason is not None:
            if self.automatic_optimization.out_of_memory is not None:
                raise ValueError(
                    f"micro_batch_size='auto' can't repeat a step that is done with {reason}: give a number."
                )
            if reason != self._announced:
                log.debug("epochs run in Lightning's own loop, because of %s", reason)
            self._announced = reason
            self.data_wait_s = None
            super().run(data_fetcher)
            return
        self.reset()
        self.on_run_start(data_fetcher)
        trainer: Any = self.trainer
        attach_log(trainer.lightning_module, trainer._logger_connector)
        flat = _Epoch(self, data_fetcher)
        try:
            # Lightning's loop runs the first batch after a resumption: it knows which parts of it are done.
            if self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint:
                try:
                    if not self.done and not self._begins_epoch:
                        self.advance(data_fetcher)
                        self.on_advance_end(data_fetcher)
                finally:
                    self.on_iteration_done()
            self.val_loop.restarting = False
            while not flat.is_done():
                flat.advance()
        except StopIteration:
            pass
        finally:
            trainer.heartbeat.phase = "train"
            flat.close()
            detach_log(trainer.lightning_module)

    @property
    def done(self) -> bool:
        """Whether the epoch is over."""
        return super().done and self.pending_batch_work != "end"

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Runs one batch in Lightning's own loop."""
        if self.pending_batch_work == "end":
            self.pending_batch_work = None
        else:
            super().advance(data_fetcher)

    def reset(self) -> None:
        """Called at the start of each epoch."""
        with warnings.catch_warnings():
            if self.restarting and self.trainer._checkpoint_connector.knows_place:  # type: ignore[attr-defined]
                # Lightning warns of every loader without a state_dict, but this one resumes at its position.
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepares the epoch; called when its iterator exists."""
        data: Any = self.trainer._data_connector
        if not self.restarting and not self.trainer.fit_loop.is_resuming:
            data.places.forget()
        elif self._begins_epoch:
            data.places.told.begin_again(data_fetcher, data.places.epoch)
            self._begin_new_loaders(data_fetcher)
        super().on_run_start(data_fetcher)
        self.trainer._checkpoint_connector.restore_random_state()  # type: ignore[attr-defined]
        data.places.settle()
        self.automatic_optimization.begin_epoch()
        self._mark_step(self.global_step)
        self.is_between_steps = False
        if self.pending_batch_work == "nothing":
            self.pending_batch_work = None
            self.restarting = False  # Lightning: would repeat what follows the batch
        callbacks = (getattr(callback, "on_train_step_end", None) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        self._on_train_step_end = [hook for hook in callbacks if hook is not None]

    def _begin_new_loaders(self, data_fetcher: _DataFetcher) -> None:
        """Makes the second iterator of loaders that are made in this epoch, with the random draws of the first."""
        fit_loop: Any = self.trainer.fit_loop
        is_second, fit_loop.begins_with_new_loaders = fit_loop.begins_with_new_loaders, False
        if is_second and self.trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start
            self.trainer._checkpoint_connector.restore_random_state()  # type: ignore[attr-defined]
            self.trainer._data_connector.places.settle()  # type: ignore[attr-defined]
            self.trainer._data_connector.places.begin_again()  # type: ignore[attr-defined]
            iter(data_fetcher)

    @property
    def _begins_epoch(self) -> bool:
        # Lightning: zero batches count as a multiple of val_check_interval, so the validation loaders would draw.
        return self.batch_progress.current.ready == 0 and self.trainer._checkpoint_connector.knows_place  # type: ignore[attr-defined]

    def _mark_step(self, num_steps: int) -> None:
        self._batches_at_step, self._steps = self.batch_progress.current.ready, num_steps
        if self.trainer.accumulate_grad_batches > 1:
            self._random_at_step = get_random_state()
            self.trainer._data_connector.places.draws.mark_step()  # type: ignore[attr-defined]

    @property
    def random_of_window(self) -> dict[str, Any] | None:
        """The random state at the start of an unfinished window, which a resumed run repeats; None outside of one."""
        return self._random_at_step if self.is_in_window else None

    @property
    def is_in_window(self) -> bool:
        """Whether there are batches that no optimizer step has used."""
        return self.trainer.accumulate_grad_batches > 1 and self.batches_done() < self.batch_progress.current.ready

    def batches_done(self) -> int:
        """Returns the number of this epoch's batches that optimizer steps have used, without an unfinished window."""
        progress: Any = self.batch_progress.current
        if not self.trainer.lightning_module.automatic_optimization:
            return progress.processed
        return progress.ready if self.global_step > self._steps else self._batches_at_step

    def _broadcast_sigterm_tensor(self) -> None:
        # Lightning: _TrainingEpochLoop._broadcast_sigterm_tensor, which its own loop calls before each batch.
        pass

    def on_advance_end(self, data_fetcher: _DataFetcher | None) -> None:
        """Ends an optimizer step: stops if all ranks have agreed to, and saves a snapshot if one is due.

        Lightning's own loop calls it after each batch; the flat loop after each step, without `data_fetcher`.
        """
        num_steps = self.automatic_optimization.num_steps
        if data_fetcher is not None:
            super().on_advance_end(data_fetcher)
            self.random_before_validation = None
            if self._should_accumulate():
                return
            num_steps = self.global_step  # counts steps of manual optimization, too
        self._mark_step(num_steps)
        self.first_steps.end_step()
        self.is_between_steps = True
        signals: Any = self.trainer._signal_connector
        signals.poll(self.batch_progress.total.ready)
        # If training is over, the fit loop stops instead, after the hooks at the end of the epoch.
        if signals.received_sigterm and not self._is_training_done:
            raise SIGTERMException
        if self._on_train_step_end or signals.requeues:
            is_asked = signals.snapshot_due(self.batch_progress.total.ready)
            for on_train_step_end in self._on_train_step_end:
                on_train_step_end(self.trainer, self.trainer.lightning_module, is_asked)
        self.is_between_steps = False

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        # Lightning: _TrainingEpochLoop._should_check_val_fx, called right before a validation.
        is_due = super()._should_check_val_fx(data_fetcher)
        if is_due:
            self.random_before_validation = get_random_state()
        return is_due


TrainingEpochLoop.__name__ = _TrainingEpochLoop.__name__  # the name of its entries in a profile


def why_not_flat(trainer: Trainer, fetcher: _DataFetcher | None) -> str | None:
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


def fetch(fetcher: _DataFetcher) -> Any:
    """Returns the next batch of a training fetcher.

    Raises:
        StopIteration: there is none.
    """
    # Lightning: _DataFetcher.__next__, CombinedLoader.__next__ and _MaxSizeCycle.__next__. For a single loader of known
    # length, the usual case, all three only count.
    combined: Any = fetcher._combined_loader
    cycle = combined._iterator
    if (
        type(fetcher) is _PrefetchDataFetcher
        and fetcher.length is not None
        and not fetcher.done
        and type(cycle) is _MaxSizeCycle
        and combined._iterables is combined._flattened[0]  # a single loader, not a collection
    ):
        try:
            batch = next(cycle.iterators[0])
        except StopIteration:
            fetcher.done = cycle._consumed[0] = True
            raise
        cycle._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch
    return next(fetcher)[0]


_CANCELLED: Any = object()
"""Stands for the outputs of a batch whose `on_train_batch_start` returned -1, which ends the epoch."""


class _Epoch:
    """The flat loop of one epoch, with the objects and methods that it needs looked up once."""

    def __init__(self, loop: TrainingEpochLoop, fetcher: _DataFetcher) -> None:
        trainer: Any = loop.trainer
        self._loop = loop
        self._trainer = trainer
        self._fetcher = fetcher
        self._fit_loop = trainer.fit_loop
        self._heartbeat = trainer.heartbeat
        self._connector = trainer._logger_connector
        self._hooks = Hooks(trainer)
        self._look()
        self._strategy_hook = overridden(trainer.strategy, Strategy, "on_train_batch_start")
        self._out_of_memory: OutOfMemory | None = loop.automatic_optimization.out_of_memory
        self._precision: Any = trainer.precision_plugin
        self._precision.hooks = self._hooks

    def _look(self) -> None:
        trainer = self._trainer
        self._hooks.refresh()
        self._shortcuts = Shortcuts(self._hooks)
        self._transfer = Transfer(trainer)
        self._has_idx = is_param_in_hook_signature(trainer.lightning_module.training_step, "batch_idx", min_args=2)

    def close(self) -> None:
        """Detaches the hooks from the precision plugin."""
        del self._precision.hooks

    def is_done(self) -> bool:
        # Lightning: _TrainingEpochLoop.done
        loop = self._loop
        progress = loop.batch_progress
        if progress.is_last_batch or progress.current.ready == self._fit_loop.max_batches or self._trainer.should_stop:
            return loop.done
        return loop.max_steps != -1 and loop.automatic_optimization.num_steps >= loop.max_steps

    def advance(self) -> None:
        """Trains on one batch: fetch, copy, `on_train_batch_start`, optimization, then `_end`.

        Each phase of a usual batch is one call, since calls in Python are a large part of the loop's time.

        Raises:
            StopIteration: the epoch is over, because the data has ended or `on_train_batch_start` returned -1.
        """
        # Lightning: _TrainingEpochLoop.advance
        trainer, loop = self._trainer, self._loop
        progress: Any = loop.batch_progress
        total, current = progress.total, progress.current
        batch_idx = current.ready
        if self._hooks.is_stale():
            self._look()
        watch = self._out_of_memory
        if watch is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            watch.begin_step(loop)

        self._heartbeat.phase = "fetch"
        since = perf_counter()
        batch = fetch(self._fetcher)
        if loop.data_wait_s is not None:
            loop.data_wait_s += perf_counter() - since
        if watch is not None and watch.has_failed:
            batch = trainer._data_connector.sizes.smallest_batch()
        self._heartbeat.phase = "copy"
        progress.is_last_batch = self._fetcher.done
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
            self._repeat()
            return
        if outputs is _CANCELLED:
            progress.is_last_batch = is_last = True
        total.processed += 1
        current.processed += 1
        self._end(outputs, batch, batch_idx, is_last, ends_window)

    def _optimize(self, batch: Any, batch_idx: int, ends_window: bool) -> Any:
        """Runs `on_train_batch_start` and the optimization; returns the outputs, or `_CANCELLED`."""
        loop = self._loop
        if batch is None:
            check_may_skip(self._trainer, batch_idx)
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None
        response = None
        if "on_train_batch_start" in self._hooks.present:
            response = self._hooks.call("on_train_batch_start", batch, batch_idx)
        if self._strategy_hook is not None:
            self._hooks.in_hook("on_train_batch_start", self._strategy_hook, batch, batch_idx)
        if response == -1:
            return _CANCELLED
        progress: Any = loop.batch_progress
        progress.total.started += 1
        progress.current.started += 1
        arguments = (batch, batch_idx) if self._has_idx else (batch,)
        return loop.automatic_optimization.run_flat(self._hooks, self._shortcuts, batch_idx, arguments, ends_window)

    def _repeat(self) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        assert self._out_of_memory is not None
        self._out_of_memory.repeat(self._loop)
        detach_log(module)  # it refers to logged values that were dropped
        attach_log(module, trainer._logger_connector)
        self._look()

    def _end(self, outputs: Any, batch: Any, batch_idx: int, is_last: bool, ends_window: bool) -> None:
        """Ends a batch: schedulers, `on_train_batch_end`, logging, validation, schedulers of its metrics, signals."""
        trainer, loop, connector = self._trainer, self._loop, self._connector
        # Lightning: _TrainingEpochLoop.advance, after the optimization
        has_schedulers = bool(self._hooks.strategy.lr_scheduler_configs)
        if has_schedulers:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if is_last:
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if outputs is _CANCELLED:
            raise StopIteration
        if "on_train_batch_end" in self._hooks.present:
            self._hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        connector.end_batch()
        progress = loop.batch_progress
        progress.total.completed += 1
        progress.current.completed += 1

        every = trainer.log_every_n_steps
        # Lightning: _LoggerConnector.should_update_logs
        is_logged = every and ((loop._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
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
            loop.on_advance_end(None)

    def _may_validate(self) -> bool:
        """Whether validation may be due after this batch; if so, Lightning's own condition decides."""
        every = self._trainer.val_check_batch
        if self._trainer._val_check_time_interval is not None or not isinstance(every, int):
            return True
        progress = self._loop.batch_progress
        return progress.total.ready % every == 0 or progress.current.ready % every == 0

    def _validate(self, ends_window: bool) -> None:
        trainer, loop, connector = self._trainer, self._loop, self._connector
        if not loop._should_check_val_fx(self._fetcher):
            return
        connector.collect()  # so that the batch's logged values can be read during the validation
        first_loop_iter = connector._first_loop_iter
        trainer.validating = True
        if ends_window:
            self._hooks.in_hook("on_validation_model_zero_grad", trainer.lightning_module.on_validation_model_zero_grad)
        loop.val_loop.run()
        trainer.training = True
        loop.random_before_validation = None
        connector._first_loop_iter = first_loop_iter
