"""The loop of training epochs: one short way through a batch, which calls only what the run uses."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
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
from ..data.exhausted import is_end_of_data
from ..reliability.nonfinite import NonFiniteWatch
from ..strategies.averages import end_averages
from ..strategies.step_guard import StepGuard
from .averaged_gradients import AveragedGradients
from .evaluation import EvaluationLoop
from .evidence import Evidence
from .first_steps import FirstSteps
from .garbage import GarbageCollection
from .hooks import Hooks, Transfer, overridden
from .log import attach_log, detach_log
from .metrics import agreed_value
from .optimization import AutomaticOptimization, ManualOptimization
from .out_of_memory import OutOfMemory, RetryStep
from .own_state import OwnState
from .rank_loss import RankLoss
from .same_training import SameTraining

__all__ = ["TrainingEpochLoop"]


class TrainingEpochLoop(_TrainingEpochLoop):  # Lightning: Trainer.fit_loop.epoch_loop
    """Lightning's training epoch, whose batches run in `_Epoch`."""

    automatic_optimization: AutomaticOptimization
    manual_optimization: ManualOptimization
    first_steps: FirstSteps
    rank_loss: RankLoss | None = None
    """Goes on without ranks that are lost in a step; None: their loss ends the run."""
    averaged_gradients: AveragedGradients | None = None
    """Checks the gradients of a run in which each rank steps with averages of whole gradients; None in other runs."""
    data_wait_s = 0.0
    """Seconds that training has waited for batches."""
    pending_batch_work: Literal["end", "nothing"] | None = None
    """Work that the interrupted run left for its last batch: ``"end"``, all work after the batch; None if unknown."""
    is_between_steps = False
    rng_state_before_validation: dict[str, Any] | None = None
    _fetch_began_s = 0.0
    _batches_at_step = 0
    _marked_step = 0
    _rng_state_at_step: dict[str, Any] | None = None

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int, watch: NonFiniteWatch) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = AutomaticOptimization(trainer, watch)
        self.own_state = OwnState(trainer)
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
        self.own_state.compare()
        self.trainer.engine_strategy.sync_weights()  # type: ignore[attr-defined]
        if (guard := self.automatic_optimization.step_guard) is not None:
            guard.settle()
        watch.end_epoch(self.trainer)

    def _run(self, data_fetcher: _DataFetcher) -> None:
        if self.automatic_optimization.out_of_memory is not None:
            self.automatic_optimization.out_of_memory.check_may_repeat(data_fetcher)
        if self.rank_loss is not None:
            self.rank_loss.begin_epoch(data_fetcher)
        self.reset()
        self.on_run_start(data_fetcher)
        trainer: Any = self.trainer
        attach_log(trainer.lightning_module, trainer._logger_connector)
        epoch = _Epoch(self, data_fetcher)
        try:
            watched = nullcontext() if self.rank_loss is None else self.rank_loss.in_epoch()
            with self.garbage.at_same_batches(trainer.strategy.root_device), watched:
                goes_on = epoch.resume()
                while goes_on and not epoch.is_done():
                    goes_on = epoch.advance()
        finally:
            trainer.heartbeat.phase = "train"
            epoch.close()
            detach_log(trainer.lightning_module)

    def _should_accumulate(self) -> bool:
        # Lightning: the same in several calls more, which each step would make twice.
        progress, trainer = self.batch_progress, self.trainer
        if progress.current.ready % trainer.accumulate_grad_batches == 0:
            return False
        return trainer.strategy.handles_gradient_accumulation or not self._num_ready_batches_reached()

    def _on_before_fetch(self) -> None:
        # Lightning: called by the fetcher, also where a step reads from the iterator of batches itself.
        super()._on_before_fetch()
        self._fetch_began_s = perf_counter()

    def _on_after_fetch(self) -> None:
        self.data_wait_s += perf_counter() - self._fetch_began_s
        super()._on_after_fetch()

    def reset(self) -> None:
        """Resets the loop at the start of each epoch; hides Lightning's warning if the data's position is known."""
        with warnings.catch_warnings():
            if self.restarting and self.trainer._checkpoint_connector.run_state.place.is_known:  # type: ignore[attr-defined]
                # Lightning warns of every loader without a state_dict, but this one resumes at its position.
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepares the epoch; called when its iterator exists."""
        data: Any = self.trainer._data_connector
        if not self.restarting and not self.trainer.fit_loop.is_resuming:
            if self.rank_loss is not None:
                self.rank_loss.deal_epoch()
            data.data_position.begin_next_epoch()
        elif self._begins_epoch:
            data.data_position.data_sets.restart_changed_streams(data_fetcher, data.data_position.epoch)
            self._begin_new_loaders(data_fetcher)
        super().on_run_start(data_fetcher)
        self.trainer._checkpoint_connector.run_state.random.set()  # type: ignore[attr-defined]
        data.data_position.restore_states()
        self.automatic_optimization.begin_epoch()
        self._begin_optimization()
        self._mark_step(self.global_step)
        self.is_between_steps = False
        if self.pending_batch_work == "nothing":
            self.pending_batch_work = None
            self.restarting = False  # Lightning: would repeat the work after the batch

    def _begin_optimization(self) -> None:
        trainer: Any = self.trainer
        averages = trainer.engine_strategy.capabilities.averages_whole_gradients and trainer.world_size > 1
        if averages and self.averaged_gradients is None:
            self.averaged_gradients = AveragedGradients(trainer)
        optimization = self.automatic_optimization
        watch = optimization.watch
        if watch.guards_steps and not trainer.strategy.handles_gradient_accumulation:
            if optimization.step_guard is None:
                reads = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
                is_last = watch.policy == "error"
                optimization.step_guard = StepGuard(
                    trainer, self._judged, stays=is_last, reads=reads, largest_norm=watch.largest_norm
                )
                trainer._checkpoint_connector.run_state.norms.set(optimization.step_guard.norms)
                if is_last and trainer.snapshots_path is not None:
                    is_plain = not (optimization.runs_own_schedule or trainer.config.compile)
                    optimization.evidence = Evidence(trainer, runs_again=is_plain)
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
        optimization = self.automatic_optimization
        optimization.watch.judge(trainer, flag, trainer.global_step, self.batch_idx)
        if isinstance(flag, Tensor) and optimization.evidence is not None and optimization.step_guard is not None:
            # While the batch is still there, rather than with the next values that are logged.
            optimization.step_guard.when_left_out(partial(optimization.watch.read, trainer))

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Steps the schedulers; for those of steps, one that is left out on all ranks was none."""
        guard = self.automatic_optimization.step_guard
        if guard is not None and interval == "epoch":
            guard.settle()
        elif guard is not None and self.trainer.engine_strategy.averages_gradients:  # type: ignore[attr-defined]
            if guard.verdict is True:
                return
            if guard.verdict is not False:
                guard.when_left_out(self._restore_schedules())
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _restore_schedules(self) -> Callable[[], None]:
        """Returns a function that restores the schedulers, and what they change of optimizers, as they are now."""
        schedulers = [config.scheduler for config in self.trainer.strategy.lr_scheduler_configs]
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        groups = [group for optimizer in self.trainer.strategy.optimizers for group in optimizer.param_groups]
        values = [{name: _own(value) for name, value in group.items() if name != "params"} for group in groups]

        def restore() -> None:
            for scheduler, state in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(state)
            for group, before in zip(groups, values, strict=True):
                group.update(before)

        return restore

    def _get_monitor_value(self, key: str) -> Any:
        # Lightning: _TrainingEpochLoop._update_learning_rates reads the metric of a ReduceLROnPlateau here.
        return agreed_value(self.trainer, key, super()._get_monitor_value(key))

    def _begin_new_loaders(self, data_fetcher: _DataFetcher) -> None:
        """Creates the second iterator of loaders that are new in this epoch, with the random draws of the first one."""
        fit_loop: Any = self.trainer.fit_loop
        is_second, fit_loop.begins_with_new_loaders = fit_loop.begins_with_new_loaders, False
        if is_second and self.trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start
            self.trainer._checkpoint_connector.run_state.random.set()  # type: ignore[attr-defined]
            self.trainer._data_connector.data_position.restore_states()  # type: ignore[attr-defined]
            self.trainer._data_connector.data_position.restart_loaders()  # type: ignore[attr-defined]
            iter(data_fetcher)

    @property
    def _begins_epoch(self) -> bool:
        # Lightning: zero batches count as a multiple of val_check_interval, so the validation loaders would draw.
        return self.batch_progress.current.ready == 0 and self.trainer._checkpoint_connector.run_state.place.is_known  # type: ignore[attr-defined]

    def leave_comparisons(self) -> None:
        """Ends comparisons of the first steps when a rank is lost: the others may be at different steps."""
        if self.averaged_gradients is not None:
            self.averaged_gradients.close()
            self.averaged_gradients = None
        self.first_steps.is_due = self.own_state.is_first_step_due = False
        self.own_state.begin_sums()  # one of them may not have made the last step itself

    def begin_again(self) -> None:
        """Looks up what depends on the ranks, of which fewer are left, before the first batch of a step."""
        self.automatic_optimization.begin_epoch()
        self._begin_optimization()

    def count_batches_at_step(self, num_batches: int) -> None:
        """Sets the number of this epoch's batches until the last step, which were divided anew."""
        self._batches_at_step = num_batches

    def _mark_step(self, num_steps: int) -> None:
        self._batches_at_step, self._marked_step = self.batch_progress.current.ready, num_steps
        if self.trainer.accumulate_grad_batches > 1:
            self._rng_state_at_step = get_random_state()
            self.trainer._data_connector.data_position.data_sets.mark_step()  # type: ignore[attr-defined]

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

    def end_step(self, num_steps: int) -> None:
        """Ends an optimizer step: stops if all ranks have agreed to, and saves a snapshot if one is due."""
        self._mark_step(num_steps)
        if self.averaged_gradients is not None and self.averaged_gradients.compares_weights:
            self.averaged_gradients.end_step()
        if self.first_steps.is_due:
            self.first_steps.end_step()
        if self.own_state.is_first_step_due:
            self.own_state.after_first_step()
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
        if self.rank_loss is not None:
            self.rank_loss.end_run()
        self.automatic_optimization.end_run()
        end_averages(self.trainer)
        super().teardown()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        # Lightning: _TrainingEpochLoop._should_check_val_fx, called right before a validation.
        is_due = super()._should_check_val_fx(data_fetcher)
        if is_due:
            self.rng_state_before_validation = get_random_state()
        return is_due


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # which schedulers change in place


TrainingEpochLoop.__name__ = _TrainingEpochLoop.__name__  # the name of its entries in a profile


# --- the batches of an epoch: fetch, transfer, `on_train_batch_start`, optimization (`optimization.py`), learning-rate
# schedulers, `on_train_batch_end`, logging, validation, in the order of Lightning's documentation.

_CANCELLED: Any = object()
"""Stands for the outputs of a batch whose `on_train_batch_start` returned -1, which ends the epoch."""


class _Epoch:
    """The batches of one epoch, with what all of them need looked up once: calls in Python are most of a loop's time.

    Args:
        loop: the loop of the epoch.
        fetcher: fetches its batches.
    """

    def __init__(self, loop: TrainingEpochLoop, fetcher: _DataFetcher) -> None:
        trainer: Any = loop.trainer
        self._loop: Any = loop
        self._trainer = trainer
        self._fetcher: Any = fetcher
        self._reads_itself = isinstance(fetcher, _DataLoaderIterDataFetcher)
        """Whether the step has a `dataloader_iter` argument, and reads its batches itself."""
        self._fit_loop = trainer.fit_loop
        self._heartbeat = trainer.heartbeat
        self._connector = trainer._logger_connector
        self._steering = trainer.steering if trainer.world_size > 1 else None
        alone = trainer.world_size == 1 or loop.rank_loss is not None
        alone |= not trainer.engine_strategy.needs_same_training
        self._same_training = None if alone else SameTraining(trainer, trainer.strategy.options.timeout_s)
        self._hooks = Hooks(trainer)
        self._transfer = Transfer(trainer)
        hook = overridden(trainer.strategy, Strategy, "on_train_batch_start")
        self._calls_strategy = hook is not None or self._hooks.is_profiled
        self._training_step: Any = None
        self._skips_validation = False
        self._is_automatic = trainer.lightning_module.automatic_optimization
        self._optimization: Any
        if self._is_automatic:
            self._optimization = loop.automatic_optimization
            self._steps: Any = loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            self._optimization = loop.manual_optimization
            self._steps = loop.manual_optimization.optim_step_progress.total
        self._out_of_memory: OutOfMemory | None = loop.automatic_optimization.out_of_memory
        self._repeats_steps: OutOfMemory | RankLoss | None = self._out_of_memory or loop.rank_loss
        self._precision: Any = trainer.precision_plugin
        self._precision.hooks = self._hooks

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
        return loop.max_steps != -1 and self._steps.completed >= loop.max_steps

    def resume(self) -> bool:
        """Begins a resumed epoch: with what remains of the last batch, or with the next one.

        Returns False if the epoch is over, as `advance` does.
        """
        loop = self._loop
        if not (loop._restarting or loop._loaded_from_state_dict or loop._resuming_from_checkpoint):
            return True
        try:
            if loop._begins_epoch or (loop.done and loop.pending_batch_work != "end"):
                return True
            if self._is_trained():
                progress = loop.batch_progress
                self._trainer.steering.after_batch(progress.total.ready)
                self._after_batch()
                return True
            loop.val_loop.restarting = False
            return self.advance()
        finally:
            loop.on_iteration_done()
            loop.val_loop.restarting = False

    def _is_trained(self) -> bool:
        """Whether the interrupted run has trained on the last batch, so that only the work after it remains."""
        loop = self._loop
        if loop.pending_batch_work == "end":
            loop.pending_batch_work = None
            return True
        # Lightning: _TrainingEpochLoop.advance, at its start
        if not (loop.restarting and loop._should_check_val_fx(self._fetcher)):
            return False
        if loop.val_loop.restarted_mid_evaluation:
            return True
        if loop.restarted_on_last:  # saved after this validation
            self._skips_validation = True
            return True
        loop.val_loop.increment_progress_to_evaluation_end()
        return False

    def advance(self) -> bool:
        """Trains on one batch; returns False if the epoch is over.

        It is over if the data has ended, or `on_train_batch_start` has returned -1.
        """
        # Lightning: _TrainingEpochLoop.advance
        trainer, loop, fetcher = self._trainer, self._loop, self._fetcher
        progress: Any = loop.batch_progress
        total, current = progress.total, progress.current
        repeats = self._repeats_steps
        if repeats is not None and current.ready % trainer.accumulate_grad_batches == 0:
            repeats.begin_step(loop)
        batch_idx = current.ready

        self._heartbeat.phase = "fetch"
        try:
            batch = self._fetch()
        except StopIteration:
            return False
        if loop.rank_loss is not None and not loop.rank_loss.begin_batch():
            return True
        progress.is_last_batch = fetcher.done
        if self._reads_itself:
            # What the last step has read, as in Lightning: this one's batch is known after it.
            iterator, batch, batch_idx = batch, fetcher._batch, fetcher._batch_idx
            kwargs = {"any": iterator}
        else:
            if self._out_of_memory is not None and self._out_of_memory.has_failed:
                batch = trainer._data_connector.sizes.smallest_batch()
            if not self._transfer.is_current():
                self._transfer = Transfer(trainer)
            if not self._transfer.is_there(batch):
                self._heartbeat.phase = "copy"
                batch = self._transfer(batch)
            kwargs = None
        self._heartbeat.phase = "batch"
        total.ready += 1
        current.ready += 1
        self._connector.begin_batch(loop._results, batch)

        failure = None
        try:
            outputs = self._optimize(batch, batch_idx, kwargs)
        except (RetryStep, RuntimeError) as error:
            if repeats is None or not repeats.is_cause_of(error):
                raise
            failure = error.with_traceback(None)  # its frames would keep activations, and the process group
        except StopIteration as stop:
            if self._reads_itself and is_end_of_data(stop):
                return False
            raise
        if failure is not None:
            assert repeats is not None
            if not repeats.recover(loop, failure):
                return True
            self._hooks.strategy.end_step_of_others()
            outputs = loop.automatic_optimization.end_step_of_others()
        self._heartbeat.phase = "batch"
        total.processed += 1
        current.processed += 1
        return self._end_batch(outputs, batch, batch_idx)

    def _fetch(self) -> Any:
        """Returns the next batch, or the iterator over batches for a step that reads them itself.

        Raises:
            StopIteration: there is none.
        """
        # Lightning: _PrefetchDataFetcher.__next__, _DataFetcher.__next__, CombinedLoader.__next__ and
        # _MaxSizeCycle.__next__. For a single loader, the usual case, all four only count; if its length is not known,
        # they look one batch ahead.
        fetcher = self._fetcher
        combined: Any = fetcher._combined_loader
        cycle = combined._iterator
        if (
            self._hooks.is_profiled
            or type(fetcher) is not _PrefetchDataFetcher
            or fetcher.done
            or (fetcher.length is None and not fetcher.batches)
            or type(cycle) is not _MaxSizeCycle
            or combined._iterables is not combined._flattened[0]  # a collection of loaders
        ):
            item = next(fetcher)  # which calls `_on_before_fetch` and `_on_after_fetch`
            return item if self._reads_itself else item[0]
        earlier = [] if fetcher.length is not None else [fetcher.batches.pop(0)[0]]
        start_s = perf_counter()
        try:
            batch = next(cycle.iterators[0])
        except StopIteration:
            cycle._consumed[0] = True
            fetcher.done = not fetcher.batches
            if not earlier:
                raise
            return earlier[0]
        self._loop.data_wait_s += perf_counter() - start_s
        index, cycle._idx = cycle._idx, cycle._idx + 1
        fetcher.fetched += 1
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length
            return batch
        fetcher.batches.append((batch, index, 0))
        return earlier[0]

    def _optimize(self, batch: Any, batch_idx: int, kwargs: dict[str, Any] | None) -> Any:
        """Runs `on_train_batch_start` and the optimization; returns the outputs, or `_CANCELLED`."""
        loop, hooks = self._loop, self._hooks
        if batch is None and not self._reads_itself:
            self._check_may_skip(batch_idx)
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None
        response = hooks.call("on_train_batch_start", batch, batch_idx)
        if self._calls_strategy:
            call._call_strategy_hook(self._trainer, "on_train_batch_start", batch, batch_idx)
        progress: Any = loop.batch_progress
        if response == -1:
            if self._steering is not None:
                self._steering.cancel_epoch(progress.total.ready)
            progress.is_last_batch = True
            return _CANCELLED
        progress.total.started += 1
        progress.current.started += 1
        if self._same_training is not None:
            self._same_training.check()
        if kwargs is None:
            kwargs = {"batch": batch}
            if (step := hooks.module.training_step) != self._training_step:  # a callback may replace it at any time
                self._training_step, self._has_idx = step, is_param_in_hook_signature(step, "batch_idx", min_args=2)
            if self._has_idx:
                kwargs["batch_idx"] = batch_idx
        arguments = (None, batch_idx, kwargs) if self._is_automatic else (kwargs,)
        if not hooks.is_profiled:
            return self._optimization.run(*arguments)
        with self._trainer.profiler.profile("run_training_batch"):
            return self._optimization.run(*arguments)

    def _check_may_skip(self, batch_idx: int) -> None:
        if self._trainer.world_size > 1:
            raise RuntimeError(
                f"The train_dataloader yielded None as batch {batch_idx} of rank {self._trainer.global_rank}, and the"
                " other ranks would wait forever. Let its `collate_fn` return a batch, or leave the samples out of the"
                " data set."
            )

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> bool:
        """Ends a batch: schedulers, `on_train_batch_end`, logging, and the work after it; returns as `advance` does."""
        trainer, loop, connector, fetcher = self._trainer, self._loop, self._connector, self._fetcher
        # Lightning: _TrainingEpochLoop.advance, after the optimization
        progress = loop.batch_progress
        if self._hooks.strategy.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if outputs is _CANCELLED:
            return False
        if self._reads_itself:
            batch, batch_idx, progress.is_last_batch = fetcher._batch, fetcher._batch_idx, fetcher.done
        self._hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        connector.end_batch()
        progress.total.completed += 1
        progress.current.completed += 1
        if self._steering is not None:
            self._steering.after_batch(progress.total.ready)

        interval = trainer.log_every_n_steps
        # Lightning: _LoggerConnector.should_update_logs
        is_logged = interval and ((loop._batches_that_stepped + 1) % interval == 0 or trainer.should_stop)
        if (is_logged or trainer.fast_dev_run) and not loop._should_accumulate():
            self._heartbeat.phase = "log"
            connector.log_metrics(connector.metrics["log"])
            self._heartbeat.phase = "batch"
        self._after_batch()
        return True

    def _after_batch(self) -> None:
        """Does the work after a batch: validation, schedulers of its metrics, signals, snapshots."""
        # Lightning: _TrainingEpochLoop.on_advance_end
        trainer, loop = self._trainer, self._loop
        progress = loop.batch_progress
        ends_window = not loop._should_accumulate()
        is_last = progress.is_last_batch or progress.current.ready == self._fit_loop.max_batches
        if ends_window and loop.rank_loss is not None:
            loop.rank_loss.end_step()
        if is_last or trainer.should_stop or self._may_validate():
            self._validate(ends_window)
        if self._hooks.strategy.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if ends_window:
            loop._batches_that_stepped += 1
        if trainer.should_stop:
            loop._save_loggers_on_train_batch_end()
        if ends_window:
            loop.end_step(self._steps.completed)
        if progress.total.ready >= loop.garbage.due:
            loop.garbage.collect(progress.total.ready)

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
        is_due = loop._should_check_val_fx(self._fetcher) and not self._skips_validation
        self._skips_validation = False
        if not is_due:
            loop.rng_state_before_validation = None
            return
        connector.collect()  # so that the batch's logged values can be read during the validation
        first_loop_iter = connector._first_loop_iter
        trainer.validating = True
        if ends_window:
            call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        with loop.garbage.automatic():
            if loop.rank_loss is None:
                loop.val_loop.run()
            else:
                loop.rank_loss.validate(loop)
        trainer.training = True
        loop.rng_state_before_validation = None
        connector._first_loop_iter = first_loop_iter
