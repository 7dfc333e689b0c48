"""Installs the engine's loops and connectors in place of Lightning's, right after the trainer was built."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, ParamSpec

from lightning.fabric.utilities.data import get_all_subclasses
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichModelSummary

# Lightning: called when a run is interrupted.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

# Lightning: a finder, such as BatchSizeFinder, ends its run with this exception.
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import get_console
from rich.table import Table
from torch.utils.data import BatchSampler, DataLoader

# Lightning: the base of its launchers of workers, and of the engine's.
# Lightning: its own decorator of `Trainer.__init__` reads these; for a subclass it would read PL_ENGINE_*.
from .._compat.lightning import _CallbackConnector, _MultiProcessingLauncher, _parse_env_variables, _TunerExitException
from ..config import EngineConfig
from ..data.batch_sizes import BatchSizes
from ..data.exhausted import naming_exhausted_iterators
from ..distributed.environment import keeping_interface, rank_variables
from ..distributed.object_group import SELF, WORLD, ObjectGroup
from ..distributed.variables import with_values
from ..flags import check_count
from ..loggers.run_names import logging_run_parameters, use_run_logger
from ..reliability.failure import report_failure
from ..reliability.heartbeat import Heartbeat
from ..reliability.nonfinite import NonFiniteWatch
from ..reliability.signals import SignalConnector, Steering
from ..reliability.stack_answers import StackAnswers
from ..reliability.watchdog import Watchdog
from ..resume.checkpoint_connector import CheckpointConnector
from ..resume.run_history import RunHistory
from ..run_info import log_folder
from ..strategies import EngineStrategy, adapt
from ..strategies.averages import swapped_back
from .data_connector import DataConnector
from .evaluation import EvaluationLoop, PredictionLoop
from .first_steps import FirstSteps
from .fit import FitLoop
from .metrics import LoggerConnector, caller_of_kind
from .out_of_memory import OutOfMemory
from .rank_loss import LostRanks, RankLoss
from .roll_back import RollBack
from .runs import allow_nonempty_folder, check_callbacks, checked, log_later_error, quiet, reports_uncaught
from .several_optimizers import allowing_several_optimizers
from .training import TrainingEpochLoop

__all__ = ["TrainerBase", "defaults_from_environment", "install_loops"]

_P = ParamSpec("_P")


def defaults_from_environment(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an ``__init__`` so that PL_TRAINER_* variables are the defaults of its arguments."""

    @reports_uncaught
    @functools.wraps(init)
    def with_defaults(*args: _P.args, **flags: _P.kwargs) -> None:
        defaults = vars(_parse_env_variables(Trainer))
        try:
            init(*args, **{**defaults, **flags})
        except (TypeError, ValueError) as error:
            names = [f"PL_TRAINER_{name.upper()}" for name in defaults if name not in flags]
            if names:
                error.add_note(f"Environment: {with_values(names)}")
            raise

    return with_defaults


_LAST_SAVE_TIMEOUT_S = 5.0
"""The seconds that a failed rank waits for the save in flight, in which the other ranks take part."""


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


class TrainerBase(Trainer):
    """The engine's base: saves in the background, and reports a failed rank before callbacks wait for the others."""

    heartbeat: Heartbeat
    """The position of this process in its run."""
    steering: Steering
    """The agreement of the ranks on what steers their loops."""
    hang_timeout_s: float | None = None
    """The longest time that a rank may make no progress, in seconds; None without limit."""
    config: EngineConfig
    """The arguments of the engine's constructor."""
    engine_strategy: EngineStrategy
    """The strategy itself, or an adapter of one that is not the engine's."""
    is_trial = False
    """Whether the run is a part of `verify` or `bench_comm`, whose result is all that is printed."""
    stopped_by: Any = None
    """The callback or module that asked the run to end early; None if none has."""
    _run_callbacks: Sequence[Callback] = ()
    _ended_by: BaseException | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with quiet():
            super().__init__(*args, **kwargs)
        self.engine_strategy = adapt(self.strategy)

    @property
    def flags(self) -> dict[str, Any]:
        """The arguments of the engine's constructor, by name."""
        return self.config.arguments

    def __setattr__(self, name: str, value: Any) -> None:
        # Not a property: the loops read it several times in each batch.
        if name == "should_stop" and value and self.stopped_by is None:
            self.stopped_by = caller_of_kind((Callback, LightningModule))
        super().__setattr__(name, value)

    fit = checked(Trainer.fit)  # the engine's own `fit` is decorated by `reports_uncaught`, too
    validate = reports_uncaught(checked(Trainer.validate))
    test = reports_uncaught(checked(Trainer.test))
    predict = reports_uncaught(checked(Trainer.predict))

    # Lightning: Trainer._run, within the trainer's own handling of exceptions.
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._ended_by = self.stopped_by = None
        try:
            with (
                quiet(is_trial=self.is_trial),
                logging_run_parameters(),
                keeping_interface(),
                _restoring_loader_classes(),
                allowing_several_optimizers(self),
            ):
                results = self._run_watched(*args, **kwargs)
        except BaseException as exception:
            self._ended_by = exception
            is_worker = isinstance(self.strategy.launcher, _MultiProcessingLauncher)
            if is_worker and isinstance(exception, SIGTERMException):
                call._interrupt(self, exception)  # otherwise there is no state to save
            if is_worker or isinstance(exception, _TunerExitException):  # Lightning does not handle it as an error
                self._end_run(exception)
            raise
        self._end_run(None)
        return results

    def add_run_callbacks(self) -> None:
        """Adds the engine's own callbacks of a run to the user's; `_end_run` removes them."""
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        callbacks += [callback for callback in self._run_callbacks if callback not in callbacks]

    def _end_run(self, exception: BaseException | None) -> None:
        """Calls the callbacks' hook `on_run_end`, after all other hooks and saves of the run."""
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        for callback in dict.fromkeys([*callbacks, *self._run_callbacks]):
            if (on_run_end := getattr(callback, "on_run_end", None)) is not None:
                on_run_end(self, self.lightning_module, exception)
        callbacks[:] = [callback for callback in callbacks if callback not in self._run_callbacks]

    def _run_watched(self, *args: Any, **kwargs: Any) -> Any:
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        checkpoints.begin()
        checkpoints.logs.open()
        self._data_connector.data_position.begin_run()  # type: ignore[attr-defined]
        folder = os.path.join(self.default_root_dir, "failures")
        logs = log_folder(self) if self.is_global_zero else None
        answers = StackAnswers(
            self.heartbeat, _absolute(self.default_root_dir), logs and _absolute(logs), self.world_size
        )
        watchdog = Watchdog(self.heartbeat, self.hang_timeout_s, folder, self.world_size, self.strategy, answers)
        watchdog.start()
        rank_loss = self.fit_loop.epoch_loop.rank_loss  # type: ignore[attr-defined]
        if rank_loss is not None:
            rank_loss.watchdog, watchdog.lose = watchdog, rank_loss.lose_present
        try:
            results = self._run_again_after_losses(*args, **kwargs)
            checkpoints.saver.finish()
            watchdog.stop()
            return results
        except BaseException as ended:
            exception = self._signal_connector.cause_of(ended)  # type: ignore[attr-defined]
            checkpoints.is_ending = True
            if rank_loss is not None:
                rank_loss.explain(exception)
            timeout_s = None if isinstance(exception, SIGTERMException) else _LAST_SAVE_TIMEOUT_S
            try:
                report_failure(
                    exception,
                    # Lightning: the launchers of workers; the parent raises the worker's exception.
                    print_traceback=not isinstance(self.strategy.launcher, _MultiProcessingLauncher),
                    watchdog=watchdog,
                    leaves=self.engine_strategy.can_exit_alone,
                    finish=lambda: checkpoints.saver.finish(timeout_s),
                )
            except Exception as later:
                log_later_error(later)
            if exception is ended:
                raise
            raise exception from ended

    def _run_again_after_losses(self, *args: Any, **kwargs: Any) -> Any:
        """Runs; after each loss of ranks that a run does not go on after by itself, again from a snapshot."""
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        rank_loss = self.fit_loop.epoch_loop.rank_loss  # type: ignore[attr-defined]
        while True:
            continues_logs = allow_nonempty_folder() if checkpoints.logs.goes_on else nullcontext()
            try:
                with (
                    continues_logs,
                    rank_variables(self.global_rank, self.world_size, self.num_devices),
                    naming_exhausted_iterators(),
                ):
                    return super()._run(*args, **kwargs)
            except RuntimeError as error:
                if rank_loss is None or not rank_loss.returns_after(error):
                    raise
                failure = error.with_traceback(None)  # its frames would keep the module's shards and the groups
                failure.__context__ = None
            kwargs["ckpt_path"] = rank_loss.go_back(failure, kwargs.get("ckpt_path"))
            _renew_fit_loop(self)
            checkpoints.begin()
            checkpoints.logs.open()
            self._data_connector.data_position.begin_run()  # type: ignore[attr-defined]

    # Lightning: Trainer._teardown, called at the end of a run, which ends connections that a save may need.
    def _teardown(self) -> None:
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        if not checkpoints.is_ending:  # otherwise `report_failure` has finished it
            checkpoints.saver.finish()
        super()._teardown()
        # Lightning: the end of its handling of an exception, after all callbacks and loggers have seen it.
        if self.state.status == TrainerStatus.INTERRUPTED and self._ended_by is not None:
            self._end_run(self._ended_by)

    @property
    def data_ranks(self) -> ObjectGroup:
        """The group of the ranks with different samples."""
        # A process of a group may run an engine on its own.
        return SELF if self.world_size == 1 else self.engine_strategy.data_ranks

    @property
    def data_size(self) -> int:
        """The number of ranks with different samples, connected or not."""
        return 1 if self.world_size == 1 else self.engine_strategy.data_size

    @property
    def data_rank(self) -> int:
        """The index of this rank among the ranks with different samples."""
        return 0 if self.world_size == 1 else self.engine_strategy.data_rank

    @property
    def all_ranks(self) -> ObjectGroup:
        """The group of all ranks of the run, without lost ones; they are connected while the run lasts."""
        if self.world_size == 1:
            return SELF
        return self.data_ranks if self.data_size == self.world_size else WORLD

    @property
    def batch_sizes(self) -> tuple[int, int, int] | None:
        """Samples of an optimizer step, of a micro-batch at most, and micro-batches of a rank; None if unknown."""
        return self._data_connector.sizes.of_full_step  # type: ignore[attr-defined]

    @property
    def rank_losses(self) -> list[LostRanks]:
        """The losses of ranks after which ``on_rank_loss="continue"`` has gone on in this run."""
        rank_loss = self.fit_loop.epoch_loop.rank_loss  # type: ignore[attr-defined]
        return [] if rank_loss is None else rank_loss.events

    @property
    def num_skipped_steps(self) -> int:
        """The optimizer steps of this run that ``nonfinite="skip"`` has left out, as far as the host has read them."""
        return self.fit_loop.epoch_loop.automatic_optimization.watch.num_skipped  # type: ignore[attr-defined]

    def is_filler(self, batch_idx: int) -> bool:
        """Whether a training batch of this rank is padding: it keeps the ranks in step, and its samples don't count."""
        return self.data_size > 1 and self._data_connector.sizes.is_filler(batch_idx)  # type: ignore[attr-defined]

    @property
    def data_wait_s(self) -> float:
        """Seconds that this rank's training has waited for batches since its start."""
        return self.fit_loop.epoch_loop.data_wait_s  # type: ignore[attr-defined]

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a rank's micro-batch at most, under a `global_batch_size`; None without one, or before training.

        With ``micro_batch_size="auto"`` it can be set, by all ranks in the same step, to let it grow again.
        """
        return self._data_connector.sizes.current  # type: ignore[attr-defined]

    @micro_batch_size.setter
    def micro_batch_size(self, size: int) -> None:
        out_of_memory = self.fit_loop.epoch_loop.automatic_optimization.out_of_memory  # type: ignore[attr-defined]
        if out_of_memory is None:
            raise ValueError("micro_batch_size can change while training only if it is 'auto'.")
        out_of_memory.next_size = check_count("micro_batch_size", size)

    def request_snapshot(self) -> None:
        """Makes all ranks save a snapshot after the same step; any rank may call it."""
        self._signal_connector.request_snapshot()  # type: ignore[attr-defined]

    @property
    def snapshots_path(self) -> str | None:
        """The folder in which a callback saves snapshots; None without such a callback."""
        folders = [getattr(callback, "snapshot_folder", None) for callback in self.callbacks]  # type: ignore[attr-defined]
        return next((folder(self) for folder in folders if folder is not None), None)

    def on_rank_zero(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on rank 0, and returns its result there; if it raises an error, all ranks raise it."""
        results: list[Any] = []
        self._checkpoint_connector.saver.agree(lambda: results.append(function()))  # type: ignore[attr-defined]
        return results[0] if results else None

    def finish_saving(self) -> bool:
        """Waits for the save in flight; returns whether the last save has succeeded."""
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        checkpoints.saver.finish()
        return not checkpoints.saver.has_failed

    @property
    def last_checkpoint(self) -> str | None:
        """The newest checkpoint of this run that is on the disk."""
        return self._checkpoint_connector.saver.newest  # type: ignore[attr-defined]

    @property
    def run_history(self) -> RunHistory:
        """The identity of this run and its snapshots."""
        return self._checkpoint_connector.history  # type: ignore[attr-defined]

    def remove_checkpoint(self, path: str) -> None:
        """Removes a checkpoint when the save in flight has succeeded; called by one rank."""
        self._checkpoint_connector.saver.remove(path)  # type: ignore[attr-defined]

    def save_checkpoint(
        self,
        filepath: Any,
        weights_only: bool | None = None,
        storage_options: Any = None,
        *,
        link: str | None = None,
        kind: Literal["snapshot", "checkpoint"] = "checkpoint",
        in_background: bool = False,
    ) -> None:
        """Saves the state of the run as `filepath`; all ranks call it, and the file is complete when it returns.

        It is one file in Lightning's format, or a directory if the state is sharded. See `checkpoint_format`.

        Args:
            filepath: local path or fsspec URL.
            weights_only: leave out the state that only training needs.
            storage_options: for a user's CheckpointIO.
            link: name of a link beside `filepath` that is to point at it.
            kind: a ``"snapshot"`` is a directory that this run, or a run that continues it, may remove.
            in_background: write a directory while training continues, which waits until its state is copied.

        Raises:
            TypeError: `storage_options` without a user's CheckpointIO.
            CheckpointError: `filepath` exists and is no checkpoint.
            NonFiniteError: with ``nonfinite="error"``, a loss or gradient norm was not finite.
        """
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        consolidated_weights = self.engine_strategy.consolidated_weights
        if self.model is None or not checkpoints.is_portable:
            with swapped_back(self), consolidated_weights():
                super().save_checkpoint(filepath, weights_only, storage_options)
            return
        with (
            self.heartbeat.within("save"),
            self.profiler.profile("save_checkpoint"),  # type: ignore[attr-defined]
            swapped_back(self),
        ):

            def save() -> None:
                with consolidated_weights():
                    checkpoints.save(filepath, weights_only, storage_options, link, kind, in_background)

            rank_loss = self.fit_loop.epoch_loop.rank_loss  # type: ignore[attr-defined]
            save() if rank_loss is None else rank_loss.repeat(save)


class CallbackConnector(_CallbackConnector):  # Lightning: Trainer._callback_connector
    """Lightning's connector; a progress bar of the module replaces the default one, whatever its class."""

    def __init__(self, trainer: Trainer, default_bar: Callback | None) -> None:
        super().__init__(trainer)
        self._default_bar = default_bar

    def _attach_model_callbacks(self) -> None:
        super()._attach_model_callbacks()
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, ProgressBar) and c is not self._default_bar for c in callbacks):
            self.trainer.callbacks = [c for c in callbacks if c is not self._default_bar]  # type: ignore[attr-defined]
        sizes = self.trainer._data_connector.sizes  # type: ignore[attr-defined]
        # The module's callbacks are known only now.
        check_callbacks(callbacks, launcher=None, global_batch_size=sizes.global_batch_size)


def install_loops(
    trainer: TrainerBase,
    config: EngineConfig,
    watch: NonFiniteWatch,
    default_bar: Callback | None,
    run_callbacks: Sequence[Callback],
) -> None:
    """Replaces parts of Lightning in a trainer that has not run; these parts have no state yet.

    Args:
        trainer: changed in place.
        config: the arguments of its constructor.
        watch: checks each loss and gradient norm.
        default_bar: the default progress bar; None for none.
        run_callbacks: those that are added during each run.
    """
    trainer.heartbeat = Heartbeat(trainer)
    trainer.steering = Steering(trainer)
    trainer.hang_timeout_s = config.hang_timeout_s
    trainer._run_callbacks = run_callbacks
    # Lightning: private attributes that Trainer.__init__ sets.
    trainer._callback_connector = CallbackConnector(trainer, default_bar)
    _install_loggers(trainer, config)
    _install_connectors(trainer, config)
    _install_fit_loop(trainer, config, watch)
    _install_evaluation_loops(trainer)


def _install_loggers(trainer: TrainerBase, config: EngineConfig) -> None:
    if config.logger in (None, True):
        use_run_logger(trainer)
    users = config.callbacks if isinstance(config.callbacks, Iterable) else [config.callbacks]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Lightning: the summary that Trainer.__init__ adds if there is none.
        if type(callback) is RichModelSummary and callback not in users:
            callback.summarize = _summarize  # type: ignore[method-assign]


def _install_connectors(trainer: TrainerBase, config: EngineConfig) -> None:
    trainer._checkpoint_connector = CheckpointConnector(
        trainer,
        form=config.checkpoint_format,
        # With a global batch size, the engine itself must split the samples.
        keeps_global_batch=config.continues_runs and config.global_batch_size is None,
    )
    sizes = BatchSizes(trainer, config.global_batch_size, config.micro_batch_size)
    trainer._data_connector = DataConnector(trainer, sizes, config.uneven, seeds_samples=config.seed_samples)
    trainer._signal_connector = SignalConnector(trainer)
    # The connector has its loggers already: they stay.
    trainer._logger_connector = LoggerConnector(trainer)


def _install_fit_loop(trainer: TrainerBase, config: EngineConfig, watch: NonFiniteWatch) -> None:
    epochs = trainer.fit_loop.epoch_loop
    trainer.fit_loop = FitLoop(trainer, trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs)
    trainer.fit_loop.epoch_loop = TrainingEpochLoop(trainer, epochs.min_steps, epochs.max_steps, watch)
    trainer.fit_loop.epoch_loop.first_steps = FirstSteps(trainer, config.check_first_steps)
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    if config.micro_batch_size == "auto":
        optimization.out_of_memory = OutOfMemory(trainer)
    optimization.keeps_results = config.on_rank_loss == "continue"


def survive_losses(trainer: TrainerBase) -> None:
    """Has the next run go on after a loss of ranks, as its strategy does."""
    loop: Any = trainer.fit_loop.epoch_loop
    kind = RankLoss if trainer.engine_strategy.returns_to_snapshot is None else RollBack
    loop.rank_loss = loop.val_loop.rank_loss = kind(trainer)


def _renew_fit_loop(trainer: TrainerBase) -> None:
    """Gives a trainer whose run was interrupted a loop without state, over the same data."""
    former: Any = trainer.fit_loop
    _install_fit_loop(trainer, trainer.config, former.epoch_loop.automatic_optimization.watch)
    loop: Any = trainer.fit_loop
    # Lightning: where the connector of the data has put what was passed to `fit`.
    loop._data_source = former._data_source
    loop.epoch_loop.val_loop._data_source = former.epoch_loop.val_loop._data_source
    loop.epoch_loop.rank_loss = loop.epoch_loop.val_loop.rank_loss = former.epoch_loop.rank_loss


def _install_evaluation_loops(trainer: TrainerBase) -> None:
    inference_mode = trainer.validate_loop.inference_mode
    inference_mode &= trainer.engine_strategy.capabilities.evaluates_in_inference_mode
    for name, fn, stage in (
        ("validate_loop", TrainerFn.VALIDATING, RunningStage.VALIDATING),
        ("test_loop", TrainerFn.TESTING, RunningStage.TESTING),
    ):
        verbose = getattr(trainer, name).verbose
        setattr(trainer, name, EvaluationLoop(trainer, fn, stage, verbose, inference_mode))
    trainer.predict_loop = PredictionLoop(trainer, inference_mode)


# --- patches of loader classes
# Removes Lightning's patches of loader classes if the hook that makes a loader raises.
#
# Lightning records the arguments of loaders and batch samplers by patched methods of their classes
# (`_replace_dunder_methods`), and removes the patches only if nothing is raised. In a notebook, each later run would
# work with patched classes.


_PATCHED = ("__init__", "__setattr__", "__delattr__")


@contextmanager
def _restoring_loader_classes() -> Iterator[None]:
    """Context of a run: after an exception, no class of loaders or batch samplers stays patched."""
    try:
        yield
    except BaseException:
        for base in (DataLoader, BatchSampler):
            for cls in {base, *get_all_subclasses(base)}:
                _restore(cls)
        raise


def _restore(cls: type) -> None:
    for name in _PATCHED:
        kept = f"__old{name}"  # Lightning: where _replace_dunder_methods keeps the class's own
        if kept in vars(cls):
            setattr(cls, name, vars(cls)[kept])
            delattr(cls, kept)


# --- the model's summary
# Lightning's table of the module, without the column of FLOPs if there is no `example_input_array`.


def _summarize(
    summary_data: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **summarize_kwargs: Any,
) -> None:
    """Prints a model's summary; called by the default `RichModelSummary` in place of its own, with its arguments."""
    if total_flops:
        RichModelSummary.summarize(
            summary_data,
            total_parameters,
            trainable_parameters,
            model_size,
            total_training_modes,
            total_flops,
            **summarize_kwargs,
        )
        return
    columns = [(name, values) for name, values in summary_data if name != "FLOPs"]
    table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
    for name, _ in columns:
        is_number = name.startswith("Params") or name.endswith("sizes")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name == "Name")
    for row in zip(*(values for _, values in columns), strict=True):
        table.add_row(*row)
    console = get_console()
    console.print(table)
    total, trainable = (
        get_human_readable_count(int(number)).strip() for number in (total_parameters, trainable_parameters)
    )
    modes = f"{total_training_modes['train']} modules in train mode, {total_training_modes['eval']} in eval mode"
    console.print(
        f"{total} parameters, {trainable} trainable, {model_size:.3g} MB; {modes}", highlight=False, soft_wrap=True
    )
