"""A rank's use of its host, except the CPU time of its thread: memory of workers, files, shared memory, network."""

import multiprocessing
import os
import shutil
import time
from contextlib import suppress
from typing import Any

import psutil

__all__ = ["HostFigures", "shm_capacity_mb"]

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
