"""The clocks of `Doctor`: the host's on a CPU, and events on the compute stream of an accelerator.

If the host runs ahead of its device, both spend their time differently. So on an accelerator a phase is the time of the
compute stream from the event at its beginning to the event at its end, including gaps in which the host was late. Work
that overlaps with computing takes no time. Events are read when the device has passed them, without waiting for it.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyphase.engine._compat.torch import _functional_collectives as functional
from polyphase.engine.devices import module_of, wait_for
from polyphase.engine.phases import (
    PHASES,
    PhaseClock,
    counts_as_communication,
    exposed_s,
    listening,
    phase_of_action,
    phase_of_activity,
    tell_wait,
)

__all__ = [
    "DeviceClock",
    "HostClock",
    "Measured",
    "actions_of",
    "collectives",
    "make_clock",
    "mark_end_of_backward",
    "shown_steps",
]

_MOST_STEPS = 256
"""Number of first steps of an interval whose phases are kept until it ends."""
_MIN_STEPS = 3
"""Number of steps below which none is reported as the slowest."""
_SHOWN_S = 5e-7
"""Seconds of a phase below which it is left out of a shown step: the unit is a microsecond."""


@dataclasses.dataclass
class Measured:
    """The measurements of a clock since they were last taken.

    Args:
        seconds: by phase.
        num_steps: optimizer steps that ended.

    Attributes:
        shortest: the shortest time that a rank was in collectives in each step, once waits are separated.
    """

    seconds: dict[str, float]
    num_steps: int

    def __post_init__(self) -> None:
        self._by_rank = [self.seconds]
        self.shortest: list[float] = []

    def tell_waits(self, times: Sequence[tuple[dict[str, float], list[float]]], rank: int) -> int:
        """Separates waits for slower ranks from communication, and from the bubble of a pipeline.

        In each step, the time by which a rank was in collectives longer than the rank with the shortest time counts as
        a wait for slower ranks.

        Args:
            times: for each rank, its seconds by phase, and its seconds of communication and bubble in each step.
            rank: the index of this rank.

        Returns:
            The number of steps that all ranks have measured.
        """
        num_steps = min(len(by_step) for _, by_step in times)
        shortest = [min(step) for step in zip(*(by_step[:num_steps] for _, by_step in times), strict=True)]
        self.shortest = shortest
        self._by_rank = []
        for seconds, by_step in times:
            waited = sum(max(0.0, spent - least) for spent, least in zip(by_step, shortest, strict=False))
            self._by_rank.append(tell_wait(seconds, waited))
        self.seconds.update(self._by_rank[rank])
        return num_steps

    def mean_shares(self) -> dict[str, float]:
        """Returns the shares of the phases, mean over the ranks that are known."""
        walls = [max(sum(seconds.values()), 1e-12) for seconds in self._by_rank]
        return {
            phase: sum(seconds[phase] / wall for seconds, wall in zip(self._by_rank, walls, strict=True)) / len(walls)
            for phase in PHASES
        }


class HostClock(PhaseClock):
    """The clock of a rank that computes on the host: the host's time.

    Attributes:
        by_step: seconds of communication and bubble of each step that was not forgotten.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(now)
        self.by_step: list[float] = []
        self._at_ends: list[dict[str, float] | None] = []  # the sums at the end of each step, as long as `by_step`
        self._at_start: dict[str, float] = {}
        self._at_last: dict[str, float] = {}
        self._taken = self.seconds
        self._num_steps = 0
        self._at_step = 0.0

    def end_step(self) -> None:
        """Called after each optimizer step."""
        self._num_steps += 1
        sums = self.sums()
        exposed = sums.get("communication", 0.0) + sums.get("bubble", 0.0)  # as `exposed_s`, without its calls
        self.by_step.append(exposed - self._at_step)
        self._at_step = exposed
        self._at_last = sums.copy()
        self._at_ends.append(self._at_last if len(self._at_ends) < _MOST_STEPS else None)

    @property
    def num_pending(self) -> int:
        """Number of steps that have ended on the host, but are not measured yet."""
        return 0

    def walls(self) -> list[float]:
        """Returns the wall times of the first steps of `by_step`, at most 256 of them."""
        sums = [sum(step.values()) for step in (self._at_start, *self._kept())]
        return [after - before for before, after in itertools.pairwise(sums)]

    def phases_of(self, index: int) -> dict[str, float]:
        """Returns the seconds by phase of one of the steps that `walls` has."""
        before, after = [self._at_start, *self._kept()][index : index + 2]
        seconds = dict.fromkeys(PHASES, 0.0)
        for activity, sum_s in after.items():
            seconds[phase_of_activity(activity)] += sum_s - before.get(activity, 0.0)
        return seconds

    def _kept(self) -> Iterator[dict[str, float]]:
        return itertools.takewhile(lambda step: step is not None, self._at_ends)  # type: ignore[arg-type]

    def forget_steps(self, num_steps: int) -> None:
        """Drops the first `num_steps` steps of `by_step`."""
        if num_steps:
            self._at_start = self._at_ends[num_steps - 1] or self._at_last
        del self.by_step[:num_steps], self._at_ends[:num_steps]

    def forget_all_steps(self) -> None:
        """Drops all steps that have ended."""
        HostClock.forget_steps(self, len(self.by_step))

    def take(self, waits: bool = False) -> Measured:
        """Returns the measurements since the last call.

        Args:
            waits: whether to wait for the device, if necessary.
        """
        now, before = self.read(), self._taken
        self._taken, num_steps, self._num_steps = now, self._num_steps, 0
        return Measured({phase: now_s - before[phase] for phase, now_s in now.items()}, num_steps)


class DeviceClock(HostClock):
    """The compute stream's time.

    Args:
        device: an accelerator, whose module has events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = self._current_stream()
        self._spare: list[Any] = []
        self._last = self._event()
        self._marks: list[tuple[str | None, Any]] = []  # the phase that ended, and when; None: a step did
        self._in_step = dict.fromkeys(PHASES, 0.0)
        self._num_to_forget = 0
        self._phase = "engine"
        super().__init__()

    @property
    def is_here(self) -> bool:
        """Whether the caller's work goes to the compute stream."""
        return self._current_stream() == self._stream

    def _current_stream(self) -> Any:
        return self._module.current_stream(self._device) if hasattr(self._module, "current_stream") else None

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else self._module.Event(enable_timing=True)
        event.record() if self._stream is None else event.record(self._stream)
        return event

    def _change(self, activity: str) -> None:
        phase = phase_of_activity(activity)
        if phase != self._phase:
            self._marks.append((self._phase, self._event()))
            self._phase = phase
        super()._change(activity)

    def end_step(self) -> None:
        """Called after each optimizer step."""
        self._marks.append((None, None))

    @property
    def num_pending(self) -> int:
        """Steps that have ended on the host, and not yet on the device."""
        return sum(phase is None for phase, _ in self._marks)

    def walls(self) -> list[float]:
        """Returns the wall times of the first steps of `by_step`, at most 256 of them."""
        return [sum(step.values()) for step in self._kept()]

    def phases_of(self, index: int) -> dict[str, float]:
        """Returns the seconds by phase of one of the steps that `walls` has."""
        return dict(list(self._kept())[index])

    def take(self, waits: bool = False) -> Measured:
        """Returns what the device has done since the last call."""
        self._marks.append((self.phase, self._event()))
        if waits:
            wait_for(self._device)
        self.sums()  # sums up the hooks' times, which the host's clock measures
        seconds, num_steps = dict.fromkeys(PHASES, 0.0), 0
        num_read = self._num_passed()
        for phase, event in self._marks[:num_read]:
            if phase is None:
                num_steps += 1
                if self._num_to_forget > 0:
                    self._num_to_forget -= 1
                else:
                    self.by_step.append(exposed_s(self._in_step))
                    self._at_ends.append(self._in_step if len(self._at_ends) < _MOST_STEPS else None)
                self._in_step = dict.fromkeys(PHASES, 0.0)
                continue
            took_s = self._last.elapsed_time(event) / 1e3
            seconds[phase] += took_s
            self._in_step[phase] += took_s
            self._spare.append(self._last)
            self._last = event
        del self._marks[:num_read]
        return Measured(seconds, num_steps)

    def forget_all_steps(self) -> None:
        """Drops all steps that have ended on the host, so that the lists of all ranks continue with the same step."""
        super().forget_all_steps()
        self._num_to_forget = self.num_pending

    def _num_passed(self) -> int:
        """Returns the number of marks that the device has passed, up to the last event among them."""
        for number in range(len(self._marks), 0, -1):
            event = self._marks[number - 1][1]
            if event is not None and event.query():
                return number
        return 0


def shown_steps(
    clock: HostClock, walls: Sequence[Sequence[float]], shortest: Sequence[float], last_step: int
) -> list[dict[str, float]]:
    """Returns the phases of a median step and of the slowest one, which are the same steps on all ranks.

    Args:
        clock: this rank's, which has not yet forgotten the steps.
        walls: for each rank, the result of `walls` of its clock.
        shortest: see `Measured`.
        last_step: the number of the last step that has ended on the host.

    Returns:
        For each of the two steps: its number as ``"step"``, its mean time over the ranks as ``"wall_s"``, and this
        rank's seconds by phase. An empty list if there are too few steps.
    """
    num_steps = min([len(shortest), *map(len, walls)])
    if num_steps < _MIN_STEPS:
        return []
    sums = [sum(by_rank) for by_rank in zip(*(by_step[:num_steps] for by_step in walls), strict=True)]
    order = sorted(range(num_steps), key=lambda index: sums[index])
    first_step = last_step - clock.num_pending - len(clock.by_step) + 1
    shown = []
    for index in (order[num_steps // 2], order[-1]):
        seconds = clock.phases_of(index)
        seconds = tell_wait(seconds, max(0.0, exposed_s(seconds) - shortest[index]))
        parts = {phase: s for phase, s in seconds.items() if s >= _SHOWN_S}
        shown.append({"step": first_step + index, "wall_s": sums[index] / len(walls), **parts})
    return shown


def make_clock(device: torch.device) -> HostClock:
    """The clock for a rank that computes on `device`."""
    module = module_of(device)
    return DeviceClock(device) if hasattr(module, "Event") else HostClock()


# --- announces to a clock what loop and strategy do not announce: collectives, the end of backward, hooks


@contextmanager
def collectives(clock: PhaseClock) -> Iterator[None]:
    """Announces to `clock` each wait for a collective that is called from Python.

    The waits of DistributedDataParallel are not called from Python: see `mark_end_of_backward`.
    """
    wait, wait_tensor = dist.Work.wait, functional.wait_tensor
    timed = counts_as_communication(wait_tensor)

    def timed_wait_tensor(tensor: Tensor) -> Tensor:
        return wait_tensor(tensor) if torch.compiler.is_compiling() else timed(tensor)

    dist.Work.wait, functional.wait_tensor = counts_as_communication(wait), timed_wait_tensor  # type: ignore[method-assign]
    try:
        with listening(clock):
            yield
    finally:
        dist.Work.wait, functional.wait_tensor = wait, wait_tensor  # type: ignore[method-assign]


def mark_end_of_backward(loss: Tensor, clock: PhaseClock) -> None:
    """Announces to `clock` the waits between the last gradient of `loss` and the end of backward.

    Callbacks at the end of backward run in the order of their registration. DistributedDataParallel and FSDP2 register
    theirs when they see a gradient. A callback that is registered at the beginning of backward runs before these. A
    callback that it registers when it runs comes after them.
    """
    # torch: DistributedDataParallel and FSDP2 register their last work of a backward here.
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def begin(_: Tensor) -> None:
        queue(end_of_gradients)

    def end_of_gradients() -> None:
        outer = clock.enter("communication")

        def end_of_waits() -> None:
            clock.enter(outer)

        queue(end_of_waits)

    loss.register_hook(begin)


@contextmanager
def actions_of(profiler: Any, clock: PhaseClock) -> Iterator[None]:
    """Announces Lightning's actions for `profiler` to `clock`: hooks at the ends of epochs, and calls in steps."""
    start, stop = profiler.start, profiler.stop
    under_way: list[tuple[str, str]] = []

    def timed_start(action: str) -> None:
        start(action)
        phase = phase_of_action(action)
        if phase is not None:
            under_way.append((action, clock.enter(_hook(action) if phase == "callbacks" else phase)))

    def timed_stop(action: str) -> None:
        if under_way and under_way[-1][0] == action:
            _, outer = under_way.pop()
            clock.enter(outer)
        stop(action)

    profiler.start, profiler.stop = timed_start, timed_stop
    try:
        yield
    finally:
        del profiler.start, profiler.stop


def _hook(action: str) -> str:
    """``"[Callback]EarlyStopping{'monitor': 'x'}.on_train_end"`` -> ``"EarlyStopping.on_train_end"``."""
    owner, _, name = action.rpartition(".")
    return f"{owner.partition(']')[2].partition('{')[0]}.{name}"
