"""The position of this process in its run: phase, step, batch, and the line of code that its thread executes.

The hot path has no collective, lock or call for it: the loops assign `phase`, and the watchdog's thread reads
everything else from the loops' own counters and from the stack of the thread that runs them.
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

from ..contract import adapt
from ..distributed.waits import current_wait, wait_that_raised
from ..phases import PhaseClock
from .flight_recorder import recorded
from .tracebacks import is_installed, package_of

__all__ = ["Call", "Heartbeat", "describe", "stack_of"]

_WRAPPERS = ("wrapper", "inner", "wrapped")

_looks = threading.Lock()
"""Held while a stack is read: an engine within a run of another one has a watchdog, too."""


class Call(NamedTuple):
    """A frame of a thread's stack."""

    module: str
    """The module's name, with a dot at the end."""
    name: str
    file: str
    line: int
    is_traced: bool


class Heartbeat:
    """The position of this process in its run: phase, step and batch.

    Args:
        trainer: the trainer whose counters have step and batch.
    """

    clock: PhaseClock | None = None
    """The clock that measures the phases; None if none does, or while it pauses."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.phase = "setup"
        """``"setup"``, ``"fetch"`` (waits for the data loader), ``"copy"`` (of a batch), ``"train"`` (forward and
        backward), ``"optimizer"``, ``"log"``, ``"batch"`` (around these), ``"validate"``, ``"save"``, ...: set by the
        loops."""
        self._thread = 0
        self.positions_of_all: Callable[[], dict[int, dict[str, Any]]] = dict
        """Returns the positions of all ranks that are known here, by rank: none while no watchdog runs."""

    def __getstate__(self) -> dict[str, Any]:
        # A copied trainer takes part in no run.
        return {**vars(self), "positions_of_all": dict, "clock": None}

    def listen(self, clock: PhaseClock | None) -> None:
        """Announces each phase to `clock` from now on; None: to no clock."""
        phase = self.phase
        self.clock = clock
        # Another class, so that assigning a phase costs nothing more while no clock listens.
        self.__class__ = Heartbeat if clock is None else _Announcing
        self.phase = phase

    def begin(self) -> None:
        """Called when a run begins, by the thread that runs it."""
        self.phase = "setup"
        self._thread = threading.get_ident()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Context manager around a phase that is a part of another one; a clock counts all within it as this one."""
        clock = self.clock
        with nullcontext() if clock is None else clock.sealed(phase):
            outer, self.phase = self.phase, phase
            try:
                yield
            finally:
                self.phase = outer

    @property
    def thread(self) -> int:
        """The identifier of the thread that runs the trainer."""
        return self._thread

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._trainer.global_rank

    @property
    def resume_from(self) -> str | None:
        """The newest checkpoint that the run has saved, or otherwise the one it has begun with."""
        trainer: Any = self._trainer
        path = trainer.last_checkpoint or trainer.ckpt_path
        return None if path is None else str(path)

    @property
    def run_id(self) -> str | None:
        """The id of the run, which is in the manifests of its checkpoints; None before it is known."""
        trainer: Any = self._trainer
        return trainer.run_history.run.id or None

    def place(self) -> dict[str, Any]:
        """Returns step, batch, batch of the evaluation and phase; at least one changes while training progresses."""
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
        """Returns the position with the line of code, and the collective or wait that the thread is in.

        Args:
            with_stack: add the stack, and the last collectives.
            exception: report the place where it was raised, instead of the present one.
        """
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
    """Announces each phase that is assigned to its clock."""

    @property
    def phase(self) -> str:
        """The current phase: see `Heartbeat`."""
        return self._announced

    @phase.setter
    def phase(self, phase: str) -> None:
        self._announced = phase
        if self.clock is not None:
            self.clock.enter(phase)


def stack_of(thread: int) -> list[Call]:
    """Returns the frames of a thread of this process, the innermost first; an empty list if the thread has ended."""
    # CPython 3.11 may collect garbage while it makes the object of a frame. That can run code, and so the other thread,
    # which may leave the call; to follow `f_back` from there is a segmentation fault.
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
    """Describes a report as a sentence without the subject."""
    if report is None:
        return "has sent no report"
    doing = {"fetch": "waits for its data loader", "save": "saves a checkpoint"}.get(report["phase"], "computes")
    if report["pending"] is not None:
        doing = f"waits for other ranks in {report['pending']}"
        if report.get("units"):
            doing += f" (it {report['units']['done']})"
    line = f", at {report['line']}" if report["line"] else ""
    return f"is in phase {report['phase']!r} of step {report['step']}, batch {report['batch']}: {doing}{line}"


def _collective(stack: list[Call]) -> str | None:
    """Returns the name of torch's collective that the thread with this stack is in; None if it is in none.

    The frames show it, since torch itself (FSDP2, DTensor, DDP's backward) and users' code call collectives without
    declaring a wait. All other waits are declared by `waiting`.
    """
    for number, call in enumerate(stack):
        module, name = call.module, call.name
        # The collectives of DDP's backward are called in C++, without a frame.
        if number == 0 and (module, name) == ("torch.autograd.graph.", "_engine_run_backward"):
            return "backward"
        if module.startswith("torch.distributed.") and not name.startswith(("_", "<")) and name not in _WRAPPERS:
            return name
        if not module.startswith(("torch.", "contextlib.", "functools.", "threading.")):
            return None
    return None


def _line(stack: list[Call]) -> str | None:
    """Returns the innermost line of the user's own code; if there is none, of an installed package of unknown kind."""
    own = [call for call in stack if call.name != "<module>" and package_of(call.file) is None]
    for call in sorted(own, key=lambda call: is_installed(call.file)):
        return f"{call.file}:{call.line} in {call.name}"
    return None


def _is_debugged(stack: list[Call]) -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12, debuggers can work without tracing
    return any(call.is_traced for call in stack) or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )
