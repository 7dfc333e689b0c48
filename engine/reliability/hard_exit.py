"""Ends a process whose threads may be in calls that never return, with all processes that it has started.

These are its own child processes (workers of data loaders in the user's code don't notice that their parent has ended),
and ranks of the job, which get the time to report their positions.
"""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import NoReturn

import psutil

__all__ = ["END_TIMEOUT_S", "await_ranks", "end_tree", "hard_exit", "started_ranks"]

_FLUSH_S = 1.0
END_TIMEOUT_S = 5.0
"""The time that this process, when it ends, leaves the ranks that it has started to end by themselves."""
_TICK_S = 0.05

started_ranks: dict[int, subprocess.Popen] = {}
"""The ranks of this job that this process, itself a rank, has started."""


def hard_exit(code: int = 1) -> NoReturn:
    """Ends this process and its children, after flushing its output for at most one second."""
    late = await_ranks(END_TIMEOUT_S)
    # Flushed by a thread: if another thread writes to a pipe that nothing reads, it holds the stream's lock for ever.
    flush = threading.Thread(target=_flush, daemon=True)
    try:
        flush.start()
        flush.join(_FLUSH_S)
    except RuntimeError:  # Python 3.12 and later start no thread while they shut down
        _flush()
    with suppress(Exception):  # this process has to end in any case
        for rank in late:
            end_tree(started_ranks[rank].pid)
        _end_others()
    os._exit(code)


def await_ranks(longest_s: float | None) -> list[int]:
    """Waits until the ranks that this process has started have ended; returns those that have not.

    Args:
        longest_s: the longest time to wait; None without limit.
    """
    deadline = None if longest_s is None else time.monotonic() + longest_s
    while True:
        late = [rank for rank, process in started_ranks.items() if process.poll() is None]
        if not late or (deadline is not None and time.monotonic() > deadline):
            return late
        time.sleep(_TICK_S)


def _end_others() -> None:
    """Ends this process's children, except ranks, the resource tracker, and processes of a session of their own."""
    # CPython: the resource tracker removes shared memory when its process has ended.
    spared = {rank.pid for rank in started_ranks.values()} | {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    for child in psutil.Process().children():
        if child.pid not in spared:
            end_tree(child.pid)


def end_tree(pid: int) -> None:
    """Ends a process and its descendants, except those of a session of their own."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        session = os.getsid(0)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.Error, OSError):
                if os.getsid(member.pid) == session:
                    member.kill()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
