"""`on_rank_loss="continue"` where no rank has all state, or no step can be made again: back to the newest snapshot.

It is a resumption with fewer ranks, in the same processes: none is started, and nothing is imported. An error of a
collective interrupts the ranks that are left, wherever they are: in a step, a validation, a save, a hook, or in another
such return. They

1. end their process groups, and undo what the strategy has done to the module (`ModuleBefore`);
2. decide who is left, and meet under a new generation, as in `rank_loss.py`;
3. run the trainer again, from the newest snapshot of this run: setup, restoring, training. Hooks are called as in a run
   that ends and another one that is resumed: `teardown`, then `setup`, and all that follow.

Without a loss nothing is copied in a step, and nothing is sent.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

# Lightning: how it calls `teardown` of callbacks and modules.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerStatus

from ..distributed.agreement import LostRankError
from ..distributed.connections import MEETING_AGAIN, cut_connections
from ..reliability.rendezvous import in_words
from ..resume.run_history import AUTO, FRESH
from ..strategies import adapt
from .rank_loss import LostRanks, RankLoss, RankLossError

__all__ = ["RollBack"]


class RollBack(RankLoss):
    """Takes a run on from its newest snapshot after the loss of ranks; one for each rank.

    Args:
        trainer: the trainer of the run.
    """

    _loss: tuple[list[int], int, float] | None = None
    """The ranks of which one was lost, the steps that were made, and when; None once training has gone on."""
    _is_returning = False

    def begin_epoch(self, fetcher: Any) -> None:
        """Looks up the processes of all ranks in the first epoch, and tells of a loss in the first after it."""
        if self._registry is None:
            self._begin_run()
        self._is_in_epoch = True
        if self._loss is not None:
            (before, steps, began_s), self._loss = self._loss, None
            lost = [rank for rank in before if rank not in self._members]
            left, at = len(self._members), self._trainer.global_step
            event = LostRanks(lost, steps, left, time.monotonic() - began_s, 0, snapshot_step=at)
            self._tell(event, "They share the samples of all steps from there on, as after a resumption.")

    @contextmanager
    def in_epoch(self) -> Iterator[None]:
        """Context of an epoch; after the last one, a rank whose program is over may end."""
        try:
            yield
        finally:
            with self._lock:
                self._is_in_epoch = not self._trainer.fit_loop._is_last_epoch()

    def begin_step(self, loop: Any) -> None:
        """Notes nothing: no step is made again from its beginning."""

    def validate(self, loop: Any) -> None:
        """Runs the validation of a loop."""
        loop.val_loop.run()

    def _enter(self, place: Any) -> None:
        """Leaves all collectives to torch: none of them is repeated."""

    def is_cause_of(self, error: BaseException) -> bool:
        """Always False: no step is made again where it has failed."""
        return False

    def check(self) -> None:
        """Called where this rank waits for others, or communicates for long with none.

        Raises:
            LostRankError: a rank has ended.
        """
        if self._is_cut:
            raise LostRankError

    def end_run(self) -> None:
        """Forgets what belongs to one run, unless it begins again."""
        if not self._is_returning:
            super().end_run()
            self._loss = None

    # --- a loss

    def returns_after(self, error: BaseException) -> bool:
        """Whether a run that was interrupted by an error begins again from a snapshot: the error came from a loss."""
        return self._registry is not None and self._comes_from_loss(error)

    def go_back(self, error: RuntimeError, begun_from: Any) -> Any:
        """Regroups the ranks that are left, and undoes the run; returns the checkpoint from which it begins again.

        Args:
            error: why the run was interrupted.
            begun_from: the checkpoint with which it has begun; None without one.

        Raises:
            RankLossError: there is none, or the ranks left are too few.
        """
        trainer, strategy = self._trainer, adapt(self._trainer.strategy)
        if self._loss is None:
            self._loss = list(self._members), trainer.global_step, time.monotonic()
        was_zero, saver = trainer.is_global_zero, trainer._checkpoint_connector.saver
        with trainer.heartbeat.within("regroup"):
            with self._lock:
                self._is_cut = True
                cut_connections()
            self._undo()
            while True:
                strategy.leave_groups()
                saver.leave_groups()
                decision = self._decide(self._loss[1], error)
                self._loss = self._loss[0], decision["steps"], self._loss[2]
                try:
                    self._meet(decision["ranks"])
                    saver.connect_timeout = MEETING_AGAIN
                    path = self._checkpoint(begun_from)
                except RuntimeError as again:
                    if not self.returns_after(again):
                        raise
                    error = again.with_traceback(None)
                else:
                    break
                finally:
                    saver.connect_timeout = None
            call._call_teardown_hook(trainer)
            self._take_over_duties(is_new_zero=trainer.is_global_zero and not was_zero, path=path)
        return path

    def _undo(self) -> None:
        """Ends the run as far as this process goes, and makes the module whole."""
        trainer = self._trainer
        trainer.training = True  # it may be in a validation: then Lightning would tear down its loop alone
        self._is_returning = True
        try:
            trainer._teardown()
        finally:
            self._is_returning = False
        trainer.strategy.optimizers = []  # their state would stay in memory beside the new ones'
        adapt(trainer.strategy).make_whole()

    def _checkpoint(self, begun_from: Any) -> Any:
        history = self._trainer.run_history
        newest = history.newest_is_own()
        if newest or (newest is not None and begun_from == AUTO):
            return AUTO
        if begun_from in (None, AUTO, FRESH):
            raise RankLossError(
                f"on_rank_loss='continue': {in_words(self._lost_now)} lost before the first snapshot, to which the"
                " other ranks could have returned: none of them has all state. Start again."
            )
        return begun_from

    @property
    def _lost_now(self) -> list[int]:
        before = self._members if self._loss is None else self._loss[0]
        return [rank for rank in before if rank not in self._members]

    def _verdict(self, words: dict[int, dict[str, Any]], lost: list[int]) -> dict[str, Any]:
        """Decides as the first of the ranks that are left; those that no mesh has room for leave."""
        verdict, strategy = super()._verdict(words, lost), adapt(self._trainer.strategy)
        num_left = strategy.most_ranks(len(words))
        if not num_left and not verdict["ends"]:
            verdict["ends"] = (
                f"on_rank_loss='continue': {in_words(lost)} lost, and the {len(words)} left are too few for the mesh of"
                f" strategy {strategy!r}. Start again with resume='auto' and more ranks, or other sizes."
            )
        return {**verdict, "ranks": verdict["ranks"][: num_left or None]}

    def _take_over_duties(self, *, is_new_zero: bool, path: Any) -> None:
        trainer = self._trainer
        trainer.state.status, trainer.training, trainer.should_stop = TrainerStatus.RUNNING, True, False
        if is_new_zero:
            trainer._checkpoint_connector.logs.take_over()
            for bar in trainer.callbacks:
                if isinstance(bar, ProgressBar):
                    bar.enable()
        trainer._checkpoint_connector.logs.adopt(path)
