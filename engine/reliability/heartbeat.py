"""The position of this process in its run: phase, step, batch, and the line of code that its thread is at.

No collective, no lock and no call on the hot path: the loops assign `phase`, and all else is read, by the watchdog's
thread, from the counters that the loops keep anyway and from the stack of their thread.
"""

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from ..distributed.waits import current_wait, wait_that_raised
from ..phases import PhaseClock
from ..strategies import adapt
from .flight_recorder import recorded

__all__ = ["Call", "Heartbeat", "describe", "stack_of"]

_WRAPPERS = ("wrapper", "inner", "wrapped")
_FOREIGN = ("torch.", "lightning.", "polyphase.", "contextlib.", "functools.", "threading.", "importlib.")

_looks = threading.Lock()
"""Held while a stack is read: engines within engines each have a watchdog."""


class Call(NamedTuple):
    """One of the calls that a thread is in."""

    module: str
    """Its name, and a dot."""
    name: str
    file: str
    line: int
    is_traced: bool


class Heartbeat:
    """The position of this process in its run: phase, step and batch.

    Args:
        trainer: whose counters say the rest.
    """

    clock: PhaseClock | None = None
    """Told each phase that begins; None: nobody listens."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.phase = "setup"
        """``"setup"``, ``"fetch"`` (waits for the data loader), ``"copy"`` (of a batch), ``"train"`` (forward and
        backward), ``"optimizer"``, ``"log"``, ``"batch"`` (around these), ``"validate"``, ``"save"``, ...: set by the
        loops."""
        self._thread = 0
        self.known: Callable[[], dict[int, dict[str, Any]]] | None = None
        """Returns the positions of all ranks, as far as they are known here; None where no watchdog runs."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": None, "clock": None}  # a copy of a trainer is in no run

    def listen(self, clock: PhaseClock | None) -> None:
        """Tells `clock` each phase from now on; None: nobody any more."""
        phase = self.phase
        self.clock = clock
        # A class of its own, so that an assignment costs nothing more where nobody listens.
        self.__class__ = Heartbeat if clock is None else _Announcing
        self.phase = phase

    def begin(self) -> None:
        """Called as a run begins, by the thread that runs it."""
        self.phase = "setup"
        self._thread = threading.get_ident()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Around a part of another phase."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    @property
    def thread(self) -> int:
        """Identifier of the thread that runs the trainer."""
        return self._thread

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._trainer.global_rank

    @property
    def resume_from(self) -> str | None:
        """The newest checkpoint: that which the run has saved, or else began with."""
        trainer: Any = self._trainer
        path = trainer.last_checkpoint or trainer.ckpt_path
        return None if path is None else str(path)

    @property
    def run_id(self) -> str | None:
        """The id of the run, as the manifests of its checkpoints have it; None before it is known."""
        trainer: Any = self._trainer
        return trainer.run_history.run.id or None

    def place(self) -> dict[str, Any]:
        """Step, batch, batch of the evaluation and phase: at least one changes while training progresses."""
        # Lightning: the progress of Trainer.fit_loop.epoch_loop, of its val_loop, and of the loops for other stages.
        trainer: Any = self._trainer
        epochs = trainer.fit_loop.epoch_loop
        loops = (epochs.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        return {
            "step": trainer.global_step,
            "batch": epochs.batch_progress.total.ready,
            "evaluated": sum(loop.batch_progress.total.ready for loop in loops),
            "phase": self.phase,
        }

    def report(self, *, with_stack: bool = False, exception: BaseException | None = None) -> dict[str, Any]:
        """All that others may want to know; of the place where `exception` was raised, if there is one."""
        if exception is None:
            wait, stack = current_wait(self._thread), stack_of(self._thread)
        else:
            wait, stack = wait_that_raised(exception), _calls(traceback.walk_tb(exception.__traceback__))[::-1]
        report = {
            **self.place(),
            "pending": _collective(stack) or wait,
            "line": _line(stack),
            "units": adapt(self._trainer.strategy).place_in_units,
            "is_debugged": _is_debugged(stack),
            "resume_from": self.resume_from,
        }
        if with_stack or exception is not None:
            report["collectives"] = recorded()
        if with_stack:
            lines = [(call.file, call.line, call.name, None) for call in reversed(stack)]
            report["stack"] = "".join(traceback.StackSummary.from_list(lines).format())
        return report


class _Announcing(Heartbeat):
    """Tells its clock each phase that is assigned."""

    @property
    def phase(self) -> str:
        """See `Heartbeat`."""
        return self._announced

    @phase.setter
    def phase(self, phase: str) -> None:
        self._announced = phase
        if self.clock is not None:
            self.clock.enter(phase)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Around a part of another phase; all that is in it belongs to it."""
        with nullcontext() if self.clock is None else self.clock.sealed(phase), super().within(phase):
            yield


def stack_of(thread: int) -> list[Call]:
    """The calls that a thread of this process is in, the innermost first; none of one that has ended."""
    # CPython 3.11 may collect garbage while it makes the object of a frame. What that runs can let the other thread run
    # on and leave the call; to follow `f_back` from there is a segmentation fault.
    with _looks:
        pauses = sys.version_info < (3, 12) and gc.isenabled()
        if pauses:
            gc.disable()
        try:
            frame = sys._current_frames().get(thread)
            calls = [] if frame is None else _calls(traceback.walk_stack(frame))
            del frame
            return calls
        finally:
            if pauses:
                gc.enable()


def _calls(frames: Iterable[tuple[FrameType, int]]) -> list[Call]:
    return [
        Call(
            f"{frame.f_globals.get('__name__', '')}.",
            frame.f_code.co_name,
            frame.f_code.co_filename,
            line,
            frame.f_trace is not None,
        )
        for frame, line in frames
    ]


def describe(report: dict[str, Any] | None) -> str:
    """A report, in words."""
    if report is None:
        return "has not been heard of"
    doing = {"fetch": "waits for its data loader", "save": "saves a checkpoint"}.get(report["phase"], "computes")
    if report["pending"] is not None:
        doing = f"waits for other ranks in {report['pending']}"
        if report.get("units"):
            doing += f" (it {report['units']['done']})"
    line = f", at {report['line']}" if report["line"] else ""
    return f"is in phase {report['phase']!r} of step {report['step']}, batch {report['batch']}: {doing}{line}"


def _collective(stack: list[Call]) -> str | None:
    """Names the collective of torch that the thread with this stack is in; None if it is in none.

    By the frames: collectives are called by torch itself (FSDP2, DTensor, DDP's backward) and by users' code, where
    nobody declares a wait. All other waits are declared by `waiting`.
    """
    for number, call in enumerate(stack):
        module, name = call.module, call.name
        # The collectives of DDP's backward are torch's C++ alone.
        if number == 0 and (module, name) == ("torch.autograd.graph.", "_engine_run_backward"):
            return "backward"
        if module.startswith("torch.distributed.") and not name.startswith(("_", "<")) and name not in _WRAPPERS:
            return name
        if not module.startswith(("torch.", "contextlib.", "functools.", "threading.")):
            return None
    return None


def _line(stack: list[Call]) -> str | None:
    """The innermost line that is neither torch's nor Lightning's nor ours: that of the user's own code."""
    for call in stack:
        if call.name != "<module>" and not call.module.startswith(_FOREIGN):
            return f"{call.file}:{call.line} in {call.name}"
    return None


def _is_debugged(stack: list[Call]) -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on, debuggers need not trace
    return any(call.is_traced for call in stack) or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )
