"""What `Doctor` adds to a step: within one run it is there for a block of steps, and away for the next one.

Neighbouring blocks are a pair, so that what else goes on in the machine, and in the process, is in both; they are
short, so that many are not interrupted. What an interval's end costs is timed by itself, and divided by its steps.
"""

import dataclasses
import gc
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from _doctor_runs import QUIET, Linear
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from polyphase.callbacks import Doctor
from polyphase.engine import Engine

__all__ = ["FORMS", "Added", "added_us"]


FORMS = {"none": None, "Doctor": Doctor}
"""The classes by form; that of ``"none"`` is away in both blocks, and shows what the method itself has for an error."""
_SETTLING_STEPS, _BLOCK_STEPS = 4, 16
_LOG_EVERY = 50
_QUIET = 0.1
"""The quantile of blocks that is taken for one that nothing has disturbed."""


@dataclasses.dataclass
class Added:
    """CPU time of the thread, in microseconds of a step, pair by pair; and of each end of an interval."""

    on_us: list[float] = dataclasses.field(default_factory=list)
    off_us: list[float] = dataclasses.field(default_factory=list)
    notes_us: list[float] = dataclasses.field(default_factory=list)
    interval_steps: int = 1
    """Steps of an interval."""

    @property
    def pairs_us(self) -> list[float]:
        """The difference in each pair."""
        return [on - off for on, off in zip(self.on_us, self.off_us, strict=True)]

    @property
    def quiet_us(self) -> float:
        """The difference between the quickest tenth of the blocks with it and that of those without."""
        return _quantile(self.on_us) - _quantile(self.off_us)

    @property
    def note_us(self) -> float:
        """The end of an interval."""
        return statistics.median(self.notes_us) if self.notes_us else 0.0

    @property
    def all_us(self) -> float:
        """What a step has in all: the median of the pairs, and its share of an interval's end."""
        return statistics.median(self.pairs_us) + self.note_us / self.interval_steps


def _quantile(values: list[float]) -> float:
    return sorted(values)[int(_QUIET * len(values))]


class _Toggle(Callback):
    """Takes the doctor away and puts it back, and times the blocks between."""

    def __init__(self, doctor: Doctor | None) -> None:
        self._doctor = doctor
        self._times: dict[bool, float] = {}
        self._dice = random.Random(0)
        self._steps, self._is_on, self._is_second = 0, True, False
        self.added = Added()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._steps += 1
        if self._steps == _SETTLING_STEPS:
            self._began = time.thread_time()
        elif self._steps == _SETTLING_STEPS + _BLOCK_STEPS:
            if self._doctor is not None and self._is_on:
                self._doctor._clock.sums()  # what the block has noted, which an interval's end would sum up
            self._times[self._is_on] = 1e6 * (time.thread_time() - self._began) / _BLOCK_STEPS
            if self._is_second:
                self._add()
            self._turn(trainer)

    def _add(self) -> None:
        self.added.on_us.append(self._times[True])
        self.added.off_us.append(self._times[False])

    def _turn(self, trainer: Any) -> None:
        """Begins the next block: the other one of the pair, or either one of the next pair."""
        self._is_second = not self._is_second
        is_on = not self._is_on if self._is_second else self._dice.random() < 0.5
        self._steps = 0
        doctor, was_on, self._is_on = self._doctor, self._is_on, is_on
        if doctor is None or is_on == was_on:
            return
        if is_on:
            doctor._attach(trainer)
            trainer.callbacks.insert(0, doctor)
        else:
            doctor._detach()
            trainer.callbacks.remove(doctor)


def added_us(form: str, num_blocks: int) -> Added:
    """Microseconds that a form of the callback adds to a step of a small module, over so many pairs of blocks."""
    torch.set_num_threads(1)
    kind: Any = FORMS[form]
    doctor = None if kind is None else kind()
    toggle = _Toggle(doctor)
    if doctor is not None:
        _time_notes(doctor, toggle.added.notes_us)
        toggle.added.interval_steps = doctor.every_n_steps or _LOG_EVERY
    steps = 2 * num_blocks * (_SETTLING_STEPS + _BLOCK_STEPS) + 2
    with tempfile.TemporaryDirectory() as folder:
        flags = QUIET | {"logger": CSVLogger(folder), "log_every_n_steps": _LOG_EVERY, "default_root_dir": folder}
        callbacks = [toggle] if doctor is None else [doctor, toggle]
        engine = Engine(**flags, max_steps=steps, max_epochs=-1, callbacks=callbacks)
        gc.collect()
        gc.disable()  # a collection would be in one block of a pair
        try:
            engine.fit(Linear(), DataLoader(torch.ones(4 * steps, 8), batch_size=4))  # type: ignore[arg-type]
        finally:
            gc.enable()
        if doctor is not None and doctor not in engine.callbacks:
            doctor._end()
    return toggle.added


def _time_notes(doctor: Any, notes_us: list[float]) -> None:
    """Notes what each end of an interval costs. The blocks in which they fall are few, and not of the quickest."""
    note = doctor._note

    def timed(*args: Any, **kwargs: Any) -> None:
        began = time.thread_time()
        note(*args, **kwargs)
        notes_us.append(1e6 * (time.thread_time() - began))

    doctor._note = timed
