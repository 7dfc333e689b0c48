"""The phases of a rank's wall time: its thread is always in exactly one of them, so they add up.

Three sources announce phases: the loops, by `Heartbeat.phase`; Lightning's code, by the names of its profiler's
actions; and functions that wait for other ranks, by `PhaseClock.enter`. Without a clock, nothing is announced.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "EXPOSED",
    "PHASES",
    "PhaseClock",
    "counts_as_communication",
    "exposed_s",
    "listening",
    "phase_of_action",
    "phase_of_activity",
    "tell_wait",
    "waits_are",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

PHASES = {
    "data_wait": "waiting for the data loader",
    "copy": "copying batches to the device, and the hooks around that",
    "compute": "forward and backward",
    "communication": "waiting for collectives that do not overlap with compute, without the wait for slower ranks",
    "waiting": "waiting in collectives for slower ranks",
    "bubble": "waiting for other stages of a pipeline, without the wait for slower ones",
    "optimizer": "the optimizer's step, clipping, zeroing of gradients",
    "callbacks": "hooks of callbacks, and hooks of the module around its steps",
    "logging": "the loggers",
    "validation": "validation, its data and its metrics included",
    "checkpoint": "time in which training waits for a save",
    "engine": "everything else: the loops, schedulers, starts of epochs",
}
"""The phases of training, with a description of each."""

EXPOSED = ("bubble", "communication")
"""The phases that may include waits for slower ranks; the phase with the longest waits is first."""

_ANNOUNCED = {
    "fetch": "data_wait",
    "copy": "copy",
    "train": "compute",
    "optimizer": "optimizer",
    "log": "logging",
    "save": "checkpoint",
    "validate": "validation",
    "sanity_check": "validation",
}
"""The phases that the loops announce; the engine announces the others."""

_STEPS = {"training_step": "compute", "backward": "compute", "batch_to_device": "copy"}
_OPTIMIZER = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")


_MOST_NOTES = 20_000
"""Number of notes of a clock (two for each activity) at which they are summed up, even if nothing reads them."""


class PhaseClock:
    """Adds up the seconds of each activity, the parts of phases; an activity lasts until the next one is entered.

    An activity is a phase, a loop's name for a phase (``"fetch"``), or a hook (``"EarlyStopping.on_train_end"``).
    Entering one takes less than a microsecond: its name and the time are noted, and the notes are summed up when they
    are read.

    Args:
        now: a clock, in seconds.

    Attributes:
        now: the clock, in seconds.
        is_open: whether activities are entered; False within a sealed phase.
        num_saves: how often the phase "checkpoint" was entered.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._sums: dict[str, float] = defaultdict(float)
        self.num_saves = 0
        self._notes: list[Any] = ["engine", now()]
        self._thread = threading.get_ident()
        self.is_open = True

    @property
    def is_here(self) -> bool:
        """Whether this thread is the one that is measured."""
        return threading.get_ident() == self._thread

    @property
    def activity(self) -> str:
        """The activity that is under way."""
        return self._notes[-2]

    @property
    def phase(self) -> str:
        """The current phase."""
        return phase_of_activity(self.activity)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by phase, up to the last change."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for activity, sum_s in self.sums().items():
            seconds[phase_of_activity(activity)] += sum_s
        return seconds

    @property
    def by_hook(self) -> dict[str, float]:
        """Seconds of the phase "callbacks" by ``"Class.hook"``, without the saves and waits in them."""
        return {activity: sum_s for activity, sum_s in self.sums().items() if "." in activity}

    def enter(self, activity: str) -> str:
        """Begins `activity`, unless the current one is sealed; returns the previous one, to return to."""
        outer = self.activity
        if self.is_open:
            self._change(activity)
        return outer

    @contextmanager
    def sealed(self, phase: str) -> Iterator[None]:
        """Context manager for a part of the run that counts as `phase` as a whole; another seal ends it."""
        outer, was_open = self.activity, self.is_open
        self._change(phase)
        self.is_open = False
        self.num_saves += phase_of_activity(phase) == "checkpoint"
        try:
            yield
        finally:
            self.is_open = was_open
            self._change(outer)

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase up to this moment."""
        self._change(self.activity)
        return self.seconds

    def _change(self, activity: str) -> None:
        self._notes += activity, self.now()
        if len(self._notes) > _MOST_NOTES:
            self.sums()

    def sums(self) -> dict[str, float]:
        """Returns the seconds by activity, up to the last change."""
        notes = self._notes
        if len(notes) > 2:  # more than the activity that is under way
            for activity, began, ended in zip(notes[:-2:2], notes[1:-2:2], notes[3::2], strict=True):
                self._sums[activity] += ended - began
            del notes[:-2]
        return self._sums


def phase_of_activity(activity: str) -> str:
    """The phase that an activity belongs to: ``"fetch"`` -> ``"data_wait"``, a hook's -> ``"callbacks"``."""
    if activity in PHASES:
        return activity
    return "callbacks" if "." in activity else _ANNOUNCED.get(activity, "engine")


def phase_of_action(action: str) -> str | None:
    """The phase that an action of Lightning's profiler belongs to; None for an action with parts in several phases.

    ``"[Callback]EarlyStopping.on_train_batch_end"`` -> ``"callbacks"``
    """
    # Lightning: the names in its `trainer/call.py`, in the loops' `_on_before_fetch`, and in manual optimization.
    owner, _, name = action.rpartition(".")
    if name == "train_dataloader_next":
        return "data_wait"
    if action == "optimizer_step" or (owner.startswith("[LightningModule]") and name in _OPTIMIZER):
        return "optimizer"
    if owner.startswith("[Strategy]"):
        return _STEPS.get(name)
    if "batch_transfer" in name:
        return "copy"
    if owner.startswith("[Callback]") or (owner.startswith("[LightningModule]") and name.startswith("on_")):
        return "callbacks"
    return None


def exposed_s(seconds: Mapping[str, float]) -> float:
    """Returns the seconds in which a rank waits for others, for whatever reason, by its seconds by phase."""
    return sum(seconds.get(phase, 0.0) for phase in EXPOSED)


def tell_wait(seconds: Mapping[str, float], waited_s: float) -> dict[str, float]:
    """Returns seconds by phase, after moving `waited_s` from the phases "bubble" and "communication" to "waiting".

    If these two phases have fewer seconds, it moves all that they have.
    """
    separated, moved_s = dict(seconds), 0.0
    for phase in EXPOSED:
        part_s = min(waited_s - moved_s, separated.get(phase, 0.0))
        if part_s > 0.0:
            separated[phase] -= part_s
            moved_s += part_s
    separated["waiting"] = separated.get("waiting", 0.0) + moved_s
    return separated


_clocks: list[PhaseClock] = []
"""The clocks that measure waits for other ranks; the innermost engine's last."""


_phase_of_waits = ["communication"]


@contextmanager
def waits_are(phase: str) -> Iterator[None]:
    """Context manager in which waits for other ranks count as `phase`: a pipeline's are its bubble."""
    _phase_of_waits.append(phase)
    try:
        yield
    finally:
        _phase_of_waits.pop()


@contextmanager
def listening(clock: PhaseClock) -> Iterator[None]:
    """Context manager in which `clock` measures all waits for other ranks."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


def counts_as_communication(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that waits for other ranks: a listening clock counts its time as the phase "communication".

    Within `waits_are` it is another phase.

    It only measures. Declare a wait that the watchdog is to name with `distributed.waits.waiting`.
    """

    @wraps(function)
    def wait(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        clock = _clocks[-1] if _clocks else None
        if clock is None or not clock.is_open or not clock.is_here:
            return function(*args, **kwargs)
        outer = clock.enter(_phase_of_waits[-1])
        try:
            return function(*args, **kwargs)
        finally:
            clock.enter(outer)

    return wait
