"""`LightDoctor`: the shares of a run's time for a few microseconds of a step.

Unlike `Doctor` it measures only the first 32 steps of each interval of 512 steps, and assumes that the other steps are
equal to them; validations and saves are always measured. If the other steps were faster or slower by more than a
quarter, the next interval is measured as a whole. Waits for slower ranks are separated by interval, not by step, when
the records are read. It does not measure the CPU time of the thread, reads of the device, padding or the slowest step,
and it logs nothing. Its only collectives are one broadcast at the start and one gather at the end.
"""

import dataclasses
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from polyphase.callbacks.run_summary import RunSummary
from polyphase.engine.phases import SEALED
from polyphase.engine.run_info import log_folder, shown_path

from .callback import WARMUP_STEPS, Doctor, describe
from .clocks import Measured, mark_end_of_backward
from .interval import Interval, RankInfo
from .notes import Boards, Notes
from .verdict import judge

__all__ = ["INTERVAL_STEPS", "MEASURED_STEPS", "LightDoctor"]

INTERVAL_STEPS = 512
MEASURED_STEPS = 32
"""Number of first steps of an interval that are measured."""
_UNEVEN = 1.25
"""Ratio of the mean times of measured and other batches from which on the whole next interval is measured."""
_WORTH_S = 3.0
"""Seconds that a finding must have cost in the run to be printed, since short runs need no advice."""


class LightDoctor(Doctor):
    """`Doctor` in the form that an engine adds to a run by itself: see its argument `enable_doctor`.

    It prints at the end only if a finding has cost 3 seconds or more, at most five lines; it logs nothing. The records
    of the ranks are in the folder of the logs. Nothing is written without such a folder, or if training took less than
    3 seconds and 512 steps.
    """

    _writes_at_once = False

    def __init__(self) -> None:
        super().__init__(INTERVAL_STEPS)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # in another process nothing is under way
        self.last = state["last"]

    def notes_folder(self, trainer: Any) -> str | None:
        """Returns the folder of the ranks' files; None if nothing is written."""
        logs = log_folder(trainer)
        return None if logs is None or "://" in logs else super().notes_folder(trainer)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begins to listen."""
        super().on_train_start(trainer, pl_module)
        self._boards = Boards([], 1)
        self._window = trainer.accumulate_grad_batches
        self._counted: int | None = 0
        self._measures_all = True
        self._begin_interval(WARMUP_STEPS)

    def _begin_interval(self, num_steps: int) -> None:
        self._length = self._left = num_steps * self._window
        self._left_at_pause = max(0, num_steps - MEASURED_STEPS) * self._window
        self._marks_s = [self._steps_s()]

    def _steps_s(self) -> float:
        """Returns the seconds of training so far, without validations and saves."""
        assert self._clock is not None
        return sum(seconds for phase, seconds in self._clock.read().items() if phase not in SEALED)

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Marks the last gradient of backward, after which the rank only waits for others."""
        if self._clock is not None and self._clock.is_open and loss.requires_grad:
            mark_end_of_backward(loss, self._clock)

    on_train_batch_start = Callback.on_train_batch_start
    on_after_backward = Callback.on_after_backward

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts; pauses, or records an interval when it is over."""
        if self._has_fillers and trainer.is_filler(batch_idx):
            self._fillers += 1
        self._left -= 1
        if self._left <= 0:
            self._end_interval(trainer)
        elif self._left == self._left_at_pause:
            self._end_measured_part(trainer)

    def _end_measured_part(self, trainer: Any) -> None:
        if self._clock is None:
            return
        self._marks_s.append(self._steps_s())
        if not self._measures_all:
            self._pause(trainer)

    def _pause(self, trainer: Any) -> None:
        assert self._clock is not None
        self._clock.pause()
        trainer.heartbeat.listen(self._clock, is_paused=True)

    def _is_even(self) -> bool:
        """Whether the unmeasured batches of the interval took about as long as the measured ones."""
        if len(self._marks_s) < 2 or self._left == self._left_at_pause:
            return False
        start_s, middle_s = self._marks_s
        first_s = (middle_s - start_s) / (self._length - self._left_at_pause)
        others_s = (self._steps_s() - middle_s) / (self._left_at_pause - self._left)
        return others_s < _UNEVEN * first_s and first_s < _UNEVEN * others_s

    def _end_interval(self, trainer: Any) -> None:
        self._step, clock = trainer.global_step, self._clock
        if clock is None or self._step == self._noted_step:  # in the middle of a step
            return
        self._count_batches(trainer)
        self._measures_all = not self._is_even()
        is_warmup = self._noted_step == self._first_step
        self._note(trainer, is_warmup=is_warmup)
        if not is_warmup and not self._notes.has_file:
            self._notes.open(self._folder)
        if not clock.is_open:
            clock.resume()
            trainer.heartbeat.listen(clock)
        self._begin_interval(INTERVAL_STEPS)

    def _count_batches(self, trainer: Any) -> None:
        self._batches = self._length - self._left
        # The summary counts samples anyway.
        counts = [c.num_samples for c in trainer.callbacks if isinstance(c, RunSummary)]
        before, self._counted = self._counted, counts[0] if counts else None
        self._samples = None if self._counted is None or before is None else self._counted - before

    def _describe(self, trainer: Any) -> RankInfo:
        return dataclasses.replace(describe(trainer), waits_are_told=not self._may_gather)

    def _split_waits(self, trainer: Any, measured: Measured, is_warmup: bool) -> list[dict[str, float]]:
        measured.num_steps = self._step - self._noted_step
        return []

    def _begin_watches(self, trainer: Any) -> None:
        """Returns None: `LightDoctor` has no measurements besides its clock."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Records the rest, and sends all records to rank 0, by one gather."""
        self._step = trainer.global_step
        self._count_batches(trainer)
        super().on_train_end(trainer, pl_module)

    def _write_others(self, parts: list[tuple[RankInfo, list[Interval]]]) -> None:
        """Writes the records of ranks without a file: those of other hosts, or all if there is only one interval."""
        if self._notes.has_file:
            super()._write_others(parts)
        elif self._folder is not None and sum(interval.wall_s for interval in self._notes.intervals) >= _WORTH_S:
            for info, intervals in parts:
                Notes(self._folder, info).write(intervals)

    def summary(self) -> list[str]:
        """Returns the lines of the verdict on rank 0, at most five; none if nothing has cost much."""
        if self._run is None:
            return []
        verdict = judge(self._run)
        wall_s = max((total.wall_s for total in verdict.figures.totals.values()), default=0.0)
        if not any((finding.gain or 0.0) * wall_s >= _WORTH_S for finding in verdict.findings):
            return []
        folder = None if self._folder is None else shown_path(self._folder.removesuffix("/doctor"))
        where = [] if folder is None else [f"  all of it: polyphase doctor {folder}"]
        return [*verdict.lines()[:3], *where]
