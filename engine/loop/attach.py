"""Puts the engine's loop parts in the place of Lightning's, right after the trainer was built."""

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

# Lightning: what its own decorator of `Trainer.__init__` reads; for a subclass that one would look for PL_ENGINE_*.
from lightning.pytorch.utilities.argparse import _parse_env_variables
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..exiting import as_shells_have_it
from ..flags import check_count
from ..host_group import ALONE, EVERYONE, HostGroup
from ..strategies import Heartbeat, Watchdog, announce
from .batch_sizes import BatchSizes
from .checkpoint_connector import CheckpointConnector
from .data_connector import DataConnector
from .evaluation import EvaluationLoop
from .metrics import LoggerConnector
from .nonfinite import NonFiniteWatch
from .out_of_memory import OutOfMemory
from .prediction import PredictionLoop
from .signals import SignalConnector
from .training import TrainingEpochLoop

__all__ = ["LoopTrainer", "attach", "defaults_from_environment"]


def defaults_from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates an ``__init__`` so that PL_TRAINER_* variables stand for the arguments that are not given."""

    @functools.wraps(init)
    def with_defaults(self: Trainer, **flags: Any) -> None:
        init(self, **{**vars(_parse_env_variables(Trainer)), **flags})

    return with_defaults


_LAST_SAVE_S = 5.0
"""How long a rank that failed waits for the save in flight, which is its peers' as well."""


def _interruptible(entry_point: Callable[..., Any]) -> Callable[..., Any]:
    """The same method of a trainer, after which the exit code of Ctrl-C is the one that shells have."""

    @functools.wraps(entry_point)
    def called(*args: Any, **kwargs: Any) -> Any:
        with as_shells_have_it():
            return entry_point(*args, **kwargs)

    return called


class LoopTrainer(Trainer):
    """A trainer that saves in the background, and names a failed rank before any callback can wait for the others."""

    fit = _interruptible(Trainer.fit)
    validate = _interruptible(Trainer.validate)
    test = _interruptible(Trainer.test)
    predict = _interruptible(Trainer.predict)

    heartbeat: Heartbeat
    """Where this process is in its run."""
    hang_timeout_s: float | None = None
    """How long a rank may stand in one place."""

    # Lightning: Trainer._run, within the trainer's own handling of exceptions.
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        checkpoints.begin()
        folder = os.path.join(self.default_root_dir, "failures")
        watchdog = Watchdog(self.heartbeat, self.hang_timeout_s, folder, self.world_size, self.strategy)
        watchdog.start()
        try:
            results = super()._run(*args, **kwargs)
            checkpoints.saver.finish()
            watchdog.stop()
            return results
        except BaseException as exception:
            checkpoints.is_ending = True
            patience_s = None if isinstance(exception, SIGTERMException) else _LAST_SAVE_S
            announce(
                exception,
                watchdog=watchdog,
                leaves=getattr(self.strategy, "may_leave", False),
                finish=lambda: checkpoints.saver.finish(patience_s),
            )
            raise

    # Lightning: Trainer._teardown, called at the end of a run, which ends connections that a save may need.
    def _teardown(self) -> None:
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        if not checkpoints.is_ending:  # else the failure has seen to it
            checkpoints.saver.finish()
        super()._teardown()

    @property
    def data_ranks(self) -> HostGroup:
        """The ranks that have samples of their own, as this one sees them."""
        # A single process may run an engine of its own within a group of others.
        return ALONE if self.world_size == 1 else getattr(self.strategy, "data_ranks", EVERYONE)

    @property
    def data_size(self) -> int:
        """Number of ranks that have samples of their own, connected or not."""
        return (self.distributed_sampler_kwargs or {}).get("num_replicas", 1)

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return (self.distributed_sampler_kwargs or {}).get("rank", 0)

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a rank's micro-batch at most, under a `global_batch_size`; None without one, or before training.

        With ``micro_batch_size="auto"`` it can be set, by all ranks in the same step, to let it grow again.
        """
        return self._data_connector.sizes.present  # type: ignore[attr-defined]

    @micro_batch_size.setter
    def micro_batch_size(self, size: int) -> None:
        watch = self.fit_loop.epoch_loop.automatic_optimization.out_of_memory  # type: ignore[attr-defined]
        if watch is None:
            raise ValueError("micro_batch_size changes while training only where it was given as 'auto'.")
        watch.wanted = check_count("micro_batch_size", size)

    def request_snapshot(self) -> None:
        """Has all ranks save a snapshot after the same step; any rank may ask."""
        self._signal_connector.request_snapshot()  # type: ignore[attr-defined]

    @property
    def snapshots_path(self) -> str | None:
        """The folder in which a callback saves snapshots; None if none does."""
        folders = [getattr(callback, "snapshot_folder", None) for callback in self.callbacks]  # type: ignore[attr-defined]
        return next((folder(self) for folder in folders if folder is not None), None)

    def on_rank_zero(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on rank 0, whose result it returns there; what it raises there, all ranks raise."""
        kept: list[Any] = []
        self._checkpoint_connector.saver.agree(lambda: kept.append(function()))  # type: ignore[attr-defined]
        return kept[0] if kept else None

    @property
    def last_checkpoint(self) -> str | None:
        """The newest checkpoint that this run has saved, once it is on the disk."""
        return self._checkpoint_connector.saver.newest  # type: ignore[attr-defined]

    def remove_checkpoint(self, path: str) -> None:
        """Removes a checkpoint, as soon as the save in flight has succeeded; called by one rank."""
        self._checkpoint_connector.saver.remove(path)  # type: ignore[attr-defined]

    def save_checkpoint(
        self,
        filepath: Any,
        weights_only: bool | None = None,
        storage_options: Any = None,
        *,
        link: str | None = None,
    ) -> None:
        """Saves the state of the run as the directory `filepath`; all ranks call it.

        While training goes on, it returns when the state is copied, and the disk is written to in the background.

        Args:
            filepath: local path or fsspec URL.
            weights_only: leave out what only training needs.
            storage_options: for a CheckpointIO of the user's.
            link: name of a link beside `filepath` that shall point at it.
        """
        checkpoints: CheckpointConnector = self._checkpoint_connector  # type: ignore[assignment]
        as_one = getattr(self.strategy, "as_one", nullcontext)
        if self.model is None or not checkpoints.is_portable:
            with as_one():
                super().save_checkpoint(filepath, weights_only, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "`save_checkpoint(storage_options=...)` is for a `CheckpointIO` of your own, given as a plugin; without"
                " one, name the storage by an fsspec URL as the path."
            )
        with self.heartbeat.within("save"), self.profiler.profile("save_checkpoint"), as_one():  # type: ignore[attr-defined]
            checkpoints.save(str(filepath), weights_only, link=link)


class CallbackConnector(_CallbackConnector):  # Lightning: Trainer._callback_connector
    """Lightning's; a progress bar that the module brings takes the place of the default one, of whatever class."""

    def __init__(self, trainer: Trainer, default_bar: Callback | None) -> None:
        super().__init__(trainer)
        self._default_bar = default_bar

    def _attach_model_callbacks(self) -> None:
        super()._attach_model_callbacks()
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, ProgressBar) and c is not self._default_bar for c in callbacks):
            self.trainer.callbacks = [c for c in callbacks if c is not self._default_bar]  # type: ignore[attr-defined]


def attach(
    trainer: LoopTrainer,
    watch: NonFiniteWatch,
    default_bar: Callback | None = None,
    *,
    hang_timeout_s: float | None = None,
    async_checkpoints: bool = True,
    keeps_global_batch: bool = False,
    global_batch_size: int | None = None,
    micro_batch_size: int | Literal["auto"] | None = None,
    uneven: str = "pad",
) -> None:
    """Replaces what differs from Lightning in a trainer that has not run; the parts replaced hold no state yet.

    Args:
        trainer: changed in place.
        watch: sees each loss and gradient norm.
        default_bar: the progress bar that nobody asked for by name; None for none.
        hang_timeout_s: how long a rank may stand in one place before the run is ended; None for ever.
        async_checkpoints: save while training goes on.
        keeps_global_batch: where another number of processes resumes, change the accumulation to match.
        global_batch_size: samples of an optimizer step, over all ranks; None: as the DataLoader has it.
        micro_batch_size: samples of a rank's micro-batch at most; None: the DataLoader's ``batch_size``; ``"auto"``: as
            many as fit in memory.
        uneven: what happens where ranks have different numbers of training batches.
    """
    trainer.heartbeat = Heartbeat(trainer)
    trainer.hang_timeout_s = hang_timeout_s
    # Lightning: the private parts that Trainer.__init__ makes.
    trainer._callback_connector = CallbackConnector(trainer, default_bar)
    trainer._checkpoint_connector = CheckpointConnector(
        # A global batch size is kept by whoever deals the samples.
        trainer,
        in_background=async_checkpoints,
        keeps_global_batch=keeps_global_batch and global_batch_size is None,
    )
    trainer._data_connector = DataConnector(trainer, BatchSizes(trainer, global_batch_size, micro_batch_size), uneven)
    trainer._signal_connector = SignalConnector(trainer)
    # The connector was told its loggers already: they stay.
    trainer._logger_connector = LoggerConnector(trainer)
    epochs = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = TrainingEpochLoop(trainer, epochs.min_steps, epochs.max_steps, watch)
    if micro_batch_size == "auto":
        trainer.fit_loop.epoch_loop.automatic_optimization.out_of_memory = OutOfMemory(trainer)
    for name, fn, stage in (
        ("validate_loop", TrainerFn.VALIDATING, RunningStage.VALIDATING),
        ("test_loop", TrainerFn.TESTING, RunningStage.TESTING),
    ):
        lightnings = getattr(trainer, name)
        setattr(trainer, name, EvaluationLoop(trainer, fn, stage, lightnings.verbose, lightnings.inference_mode))
    trainer.predict_loop = PredictionLoop(trainer, trainer.predict_loop.inference_mode)
