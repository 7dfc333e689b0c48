"""`Snapshot`: saves a run regularly, so that the same command continues it; a crash loses at most one interval."""

import os
import time
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from polyphase.engine.checkpoint import CheckpointError, absolute, lock, repair
from polyphase.engine.flags import check_count, check_number, choose

__all__ = ["Snapshot", "default_snapshot"]


class Snapshot(Callback):
    """Saves the complete state of a run in the background, after whole optimizer steps, and keeps the newest few.

    It also saves when the run ends, on SIGTERM (the run then stops) and SIGUSR1 (the run continues), and, in a run of
    one process, when it fails. ``Engine(resume="auto")`` continues from the newest undamaged snapshot.

    Args:
        dirpath: folder, local or an fsspec URL; None for ``snapshots`` in the trainer's ``default_root_dir``. Only one
            run at a time can use it.
        every_n_steps: optimizer steps between two snapshots; None to disable.
        every_minutes: minutes between two snapshots, by rank 0's clock; None to disable.
        keep_last: number of snapshots to keep.
        keep_every_n_steps: keep snapshots whose step is a multiple of this forever; None to disable.
        monitor: name of a logged metric; the snapshot with the best value is kept as well.
        mode: whether the best value is the ``"min"`` or the ``"max"``.
        in_background: write while training continues: a step waits until the state is copied, not until it is written.

    Raises:
        ValueError: an argument is out of range, or neither steps nor minutes are given.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep_last: int = 2,
        keep_every_n_steps: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        in_background: bool = True,
    ) -> None:
        for name, steps in (("every_n_steps", every_n_steps), ("keep_every_n_steps", keep_every_n_steps)):
            if steps is not None:
                check_count(name, steps)
        if every_minutes is not None:
            check_number("every_minutes", every_minutes, above=0)
        # Made absolute now, so that a later change of directory does not split a run over two folders.
        self.dirpath = None if dirpath is None else absolute(dirpath)
        self._default_dirpaths: dict[str, str] = {}
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep_last = check_count("keep_last", keep_last)
        self.keep_every_n_steps = keep_every_n_steps
        self.monitor = monitor
        self.mode = choose("mode", mode, ("min", "max"))
        self.in_background = in_background
        self._best: dict[str, Any] = {}
        self._saved_step: int | None = None
        self._saved_at = 0.0
        self._saved_epochs = 0
        self._release: Callable[[], None] | None = None

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        return "Snapshot"

    def state_dict(self) -> dict[str, Any]:
        """Returns the best snapshot so far."""
        return dict(self._best)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best snapshot so far."""
        self._best = dict(state_dict)

    def snapshot_folder(self, trainer: Trainer) -> str:
        """Returns the folder of the snapshots of `trainer`."""
        if self.dirpath is not None:
            return self.dirpath
        root = trainer.default_root_dir
        if root not in self._default_dirpaths:
            self._default_dirpaths[root] = absolute(os.path.join(root, "snapshots"))
        return self._default_dirpaths[root]

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Locks the folder for this run.

        Raises:
            CheckpointError: another run saves there.
        """
        if stage == "fit" and self._release is None:
            self._release = trainer.on_rank_zero(lambda: self._take(trainer))
            self._saved_step = None

    def _take(self, trainer: Trainer) -> Callable[[], None]:
        folder = self.snapshot_folder(trainer)
        release = lock(folder)
        try:
            for path in repair(folder):
                rank_zero_info(f"Restored {path}, which was complete but not yet renamed")
        except BaseException:
            release()
            raise
        return release

    def on_rank_loss(self, trainer: Any, pl_module: LightningModule, lost: Any) -> None:
        """Locks the folder on the new rank 0, if the former one was lost; called by the engine on all ranks left."""
        self._release = trainer.on_rank_zero(lambda: self._release or self._take(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval."""
        self._saved_at = time.monotonic()
        # The state that the run resumed from need not be saved again.
        self._saved_step, self._saved_epochs = trainer.global_step, _epochs_done(trainer)

    def on_train_step_end(self, trainer: Any, pl_module: LightningModule, save_now: bool) -> None:
        """Saves if due; called by the engine between two optimizer steps, after all hooks of the first."""
        if save_now or (self.every_n_steps and trainer.global_step % self.every_n_steps == 0):
            self._save(trainer)
        # The ranks' clocks differ, so rank 0 decides, and all ranks agree on a step.
        elif self.every_minutes and trainer.is_global_zero:
            now = time.monotonic()
            if now - self._saved_at >= 60 * self.every_minutes:
                self._saved_at = now
                trainer.request_snapshot()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Saves the end of the run."""
        # Saves again if the last epoch has ended since the last save, because its mean values were logged there. A
        # finished run must not lose them when it is started again. The snapshot records an epoch that was cut short,
        # for which a longer run logs them anew.
        if trainer.loggers and _epochs_done(trainer) != self._saved_epochs:
            self._saved_step = None
        if not trainer.finish_saving():
            self._saved_step = None  # it is tried again
        self._save(trainer)
        if not trainer.finish_saving():
            raise CheckpointError(
                f"The run is over, but its end could not be saved in {self.snapshot_folder(trainer)}: a warning above"
                " has the reason. The weights are still in the module: `engine.save_checkpoint(path)` saves them."
            )

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves if the state is consistent: all ranks agreed to stop, or there is only one rank."""
        try:
            self._save_at_exception(trainer, exception)
        finally:
            self.unlock()  # Lightning does not call `teardown` after an exception

    def _save_at_exception(self, trainer: Any, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and self._saved_step is not None:
            if isinstance(exception, SIGTERMException) or trainer.world_size == 1:
                self._save(trainer)  # not after `nonfinite="error"`, which means that the state is unusable
            is_asked = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
            if not (is_asked and any(hasattr(c, "on_run_end") for c in trainer.callbacks)):  # that hook prints the same
                cause = "Ctrl-C" if isinstance(exception, KeyboardInterrupt) else "SIGTERM" if is_asked else "an error"
                rank_zero_info(f"Stopped by {cause}; to go on, run it again with resume='auto'.")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Unlocks the folder."""
        self.unlock()

    def unlock(self) -> None:
        """Unlocks the folder, if it is locked."""
        if self._release is not None:
            self._release()
            self._release = None

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if step == self._saved_step:
            return
        self._saved_step, self._saved_at, self._saved_epochs = step, time.monotonic(), _epochs_done(trainer)
        path = trainer.run_history.snapshot_path(self.snapshot_folder(trainer), step)
        self._note_best(trainer, path)
        trainer.save_checkpoint(path, link="last", kind="snapshot", in_background=self.in_background)
        if trainer.is_global_zero:
            for old in self._superfluous(trainer.run_history.snapshots(), path):
                if trainer.run_history.may_remove(old):
                    trainer.remove_checkpoint(old.path)

    def _note_best(self, trainer: Trainer, path: str) -> None:
        if self.monitor is None:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            return
        sign = 1 if self.mode == "min" else -1
        if not self._best or sign * float(value) < sign * self._best["value"]:
            self._best = {"path": path, "value": float(value)}

    def _superfluous(self, snapshots: list[Any], newest: str) -> list[Any]:
        """Returns the snapshots to remove: not among the last few, not kept forever, and not the best.

        Args:
            snapshots: snapshots of this run and of the runs it continues, newest first; no others are removed.
            newest: path of the snapshot that is being saved.
        """
        older = [snapshot for snapshot in snapshots if snapshot.name != os.path.basename(newest)]
        every, best = self.keep_every_n_steps, os.path.basename(self._best.get("path", ""))
        return [
            candidate
            for candidate in older[self.keep_last - 1 :]
            if not (every and candidate.step % every == 0) and candidate.name != best
        ]


def _epochs_done(trainer: Any) -> int:
    """Counts the epochs that are over, including one that was cut short."""
    return trainer.fit_loop.epoch_progress.current.processed


def default_snapshot() -> Snapshot:
    """Returns the callback that ``resume="auto"`` adds if the user has added none."""
    return Snapshot()
