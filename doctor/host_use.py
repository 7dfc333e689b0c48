"""Measures the training thread's CPU time in forward and backward, and the time that it waits there for a CPU."""

import mmap
import multiprocessing
import os
import shutil
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

__all__ = ["HostFigures", "HostUse", "num_cpus", "own_cpus", "rss_mb", "shm_capacity_mb"]

_PAGE_BYTES = mmap.PAGESIZE
_EVERY_BATCHES = (4, 16)
"""Distance in batches between two measured ones: among the first sixteen of an interval, and after these. It is not
smaller, since the two reads of a measurement take as long as all other work of `Doctor` in a step."""


class HostUse:
    """Reads the system's counters of this thread around some of the forwards and backwards; a read takes 10 us.

    Attributes:
        cpu_s: CPU time since `take`.
        runqueue_s: time since `take` in which the thread was ready to run, but another thread had the CPU; 0 if the
            system does not report it.
    """

    def __init__(self) -> None:
        self._file = _open_counters()
        self._is_under_way = False
        self._reset()

    def _reset(self) -> None:
        self._num_looks = self._num_batches = 0
        self.cpu_s, self.runqueue_s = 0.0, 0.0

    def begin(self) -> None:
        """Called before forward."""
        number, (often, seldom) = self._num_batches, _EVERY_BATCHES
        self._num_batches = number + 1
        self._is_under_way = number % (often if number < seldom else seldom) == 0
        if self._is_under_way:
            self._began = time.thread_time(), self._runqueue_s()

    def end(self) -> None:
        """Called after backward."""
        if self._is_under_way:
            self._is_under_way = False
            self._num_looks += 1
            self.cpu_s += time.thread_time() - self._began[0]
            self.runqueue_s += self._runqueue_s() - self._began[1]

    def take(self) -> tuple[float | None, float | None]:
        """Returns both times since the last call, extrapolated to all batches; None if unknown."""
        num_looks, num_batches, cpu_s, runqueue_s = self._num_looks, self._num_batches, self.cpu_s, self.runqueue_s
        self._reset()
        if num_looks == 0:
            return (None, None) if num_batches else (0.0, 0.0)
        factor = num_batches / num_looks
        return cpu_s * factor, None if self._file is None else runqueue_s * factor

    def close(self) -> None:
        """Closes the counters."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _runqueue_s(self) -> float:
        return 0.0 if self._file is None else int(os.pread(self._file, 96, 0).split()[1]) / 1e9


def _open_counters() -> int | None:
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux, or a kernel without these statistics
        return None
    if len(os.pread(file, 96, 0).split()) < 2:
        os.close(file)
        return None
    return file


def rss_mb() -> float:
    """Returns the resident memory of this process, in MB."""
    try:
        with open("/proc/self/statm") as file:  # psutil takes ten times as long
            return int(file.read().split()[1]) * _PAGE_BYTES / 1e6
    except (OSError, IndexError):
        return psutil.Process().memory_info().rss / 1e6


def own_cpus() -> list[int] | None:
    """Returns the CPUs that this process may use; None if these are all, or the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    return usable if len(usable) < (os.cpu_count() or 1) else None


def num_cpus() -> float:
    """Returns the number of CPUs that this process may use, limited by its affinity and its container's quota."""
    usable = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return usable if quota == "max" else min(usable, int(quota) / int(period))
    except (OSError, ValueError):
        return usable


# --- a rank's use of its host, except the CPU time of its thread: memory of workers, files, shared memory, network


_SHM = "/dev/shm"


class HostFigures:
    """Reads files of `/proc` at the end of an interval: some 40 us."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = _counters()

    def take(self) -> dict[str, Any]:
        """Returns the numbers by the field names of an `Interval`; counts are those since the last call."""
        before, self._last = self._last, _counters()
        cpu_s, received, sent = (now - then for now, then in zip(self._last, before, strict=True))
        workers = [_rss_bytes(child.pid) for child in multiprocessing.active_children()]
        return {
            "process_cpu_s": cpu_s,
            "received_mb": received / 1e6,
            "sent_mb": sent / 1e6,
            "workers_mb": sum(workers) / 1e6 if workers else None,
            "num_files": self._process.num_fds() if hasattr(self._process, "num_fds") else None,
            "shm_mb": shutil.disk_usage(_SHM).used / 1e6 if os.path.isdir(_SHM) else None,
        }


def shm_capacity_mb() -> float | None:
    """Returns the size of `/dev/shm` in MB; None without one."""
    return shutil.disk_usage(_SHM).total / 1e6 if os.path.isdir(_SHM) else None


def _counters() -> tuple[float, float, float]:
    """Returns the process's CPU seconds, and the bytes that the host received and sent, without its loopback."""
    received = sent = 0
    with suppress(OSError):
        for name, counts in psutil.net_io_counters(pernic=True).items():
            if name != "lo":
                received, sent = received + counts.bytes_recv, sent + counts.bytes_sent
    return time.process_time(), float(received), float(sent)


def _rss_bytes(pid: int | None) -> int:
    with suppress(psutil.Error, TypeError):
        return psutil.Process(pid).memory_info().rss
    return 0  # the process has ended meanwhile
