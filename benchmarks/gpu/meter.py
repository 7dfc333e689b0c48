"""What a step costs, measured in the step itself: its time, its memory, and what it has the host wait for."""

import itertools
import time
from collections import Counter
from typing import Any

import torch

from polyphase.engine.devices import peak_bytes, reset_peak, wait_for

from . import device

__all__ = ["Meter"]

# As CUDA's own library, and its traces, name them. A device is waited for as a whole where a profiler begins and ends.
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
_PAGEABLE = "Pageable -> Device"


class Meter:
    """Ticks at the beginning of each step: some to warm up, some that are timed, some whose waits are counted.

    Args:
        warm_up: steps before the first that is timed.
        timed: steps between the two readings of the clock; the device is waited for at these two only.
        counted: steps after those, which are slower where a profiler counts.

    Attributes:
        step_s: seconds of a step.
        slowest_s: seconds of the slowest of the timed steps, on the device.
        peak: bytes that were allocated at most while steps were timed.
        waits: of a counted step: times that the host has waited for the device, and copies from pageable memory.
    """

    def __init__(self, *, warm_up: int, timed: int = 0, counted: int = 0) -> None:
        self._first, self._last = warm_up, warm_up + timed
        self._end = self._last + counted
        self._num_ticks = 0
        self.step_s, self.slowest_s, self.peak = float("nan"), float("nan"), 0
        self._begins: list[torch.Event] = []
        self.waits: dict[str, float] = {}
        self._num_counted = counted
        self._profile: Any = None
        self._before: dict[str, int] = {}

    @property
    def steps(self) -> int:
        """The number of steps that a run needs."""
        return self._end + 2

    @property
    def is_done(self) -> bool:
        """Whether all has been measured."""
        return self._num_ticks > self._end

    @torch.compiler.disable  # whose graphs would be compiled anew for another number of ticks
    def tick(self) -> None:
        """Called at the beginning of each step."""
        now, self._num_ticks = self._num_ticks, self._num_ticks + 1
        if now == self._first:
            wait_for(device.root())
            reset_peak(device.root())
            self._began = time.perf_counter()
        if self._first <= now <= self._last:
            self._begins.append(torch.Event(device=device.root(), enable_timing=True))
            self._begins[-1].record()
        if now == self._last:
            wait_for(device.root())
            self.step_s = (time.perf_counter() - self._began) / max(1, self._last - self._first)
            pairs = itertools.pairwise(self._begins)
            self.slowest_s = max((begin.elapsed_time(end) / 1e3 for begin, end in pairs), default=self.slowest_s)
            self.peak = peak_bytes(device.root()) or 0
            if self._num_counted:
                self._start_counting()
        elif now == self._end:
            found = self._counted()
            self.waits = {name: found[name] / self._num_counted for name in ("waits", "pageable")}

    def _start_counting(self) -> None:
        if device.simulated() is not None:
            self._before = device.simulated().counts()
            return
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()

    def _counted(self) -> Counter[str]:
        found: Counter[str] = Counter()
        if device.simulated() is not None:
            now = device.simulated().counts()
            difference = {name: now[name] - number for name, number in self._before.items()}
            found["waits"] = sum(difference[name] for name in ("reads", "to_host", "synchronizations"))
            found["pageable"] = difference["to_device_pageable"]
            return found
        self._profile.stop()
        for event in self._profile.key_averages():
            found["waits"] += event.count * (event.key in _WAITS)
            found["pageable"] += event.count * (_PAGEABLE in event.key)
        return found
