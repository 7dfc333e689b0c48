"""The flat loop of a training epoch (fetch, transfer, step, log, validate), which calls only what the run uses.

The order is the one of Lightning's documentation: fetch, transfer, `on_train_batch_start`, optimization
(`optimization.py`), learning-rate schedulers, `on_train_batch_end`, logging, validation.
"""

from time import perf_counter
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

# Lightning: what fetches the batches of Trainer.fit_loop.epoch_loop.
from .._compat.lightning import _DataFetcher, _MaxSizeCycle, _PrefetchDataFetcher
from .hooks import Hooks, overridden
from .log import attach_log, detach_log
from .optimization import check_may_skip
from .out_of_memory import OutOfMemory, RetryStep
from .shortcuts import Shortcuts
from .transfer import Transfer

__all__ = ["FlatEpoch", "fetch"]


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


class FlatEpoch:
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
