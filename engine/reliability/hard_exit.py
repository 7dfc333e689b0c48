"""The end of a process that can't be taken down: its threads may be in calls that never return.

Nobody is left behind: neither the processes that it has started for itself (workers of data loaders in the user's code
don't notice that they are alone), nor the ranks of the job, which get the time to say where they were.
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

__all__ = ["LAST_WORDS_S", "await_ranks", "end_tree", "hard_exit", "started_ranks"]

_FLUSH_S = 1.0
LAST_WORDS_S = 5.0
"""The time that the ranks started by this process have to end, once it ends itself."""
_TICK_S = 0.05

started_ranks: dict[int, subprocess.Popen] = {}
"""The ranks of this job that this process, itself one, has started."""


def hard_exit(code: int = 1) -> NoReturn:
    """Ends this process and its children; what it has printed is written, where that takes no longer than a second."""
    late = await_ranks(LAST_WORDS_S)
    # By a thread, as another one that writes to a pipe which nobody empties holds the stream's lock for ever.
    flush = threading.Thread(target=_flush, daemon=True)
    try:
        flush.start()
        flush.join(_FLUSH_S)
    except RuntimeError:  # Python 3.12 and later start none while they shut down
        _flush()
    with suppress(Exception):  # whatever it is, this process is to end
        for rank in late:
            end_tree(started_ranks[rank].pid)
        _end_others()
    os._exit(code)


def await_ranks(longest_s: float | None) -> list[int]:
    """Waits until the ranks that this process has started have ended; returns those that have not.

    Args:
        longest_s: how long; None for ever.
    """
    deadline = None if longest_s is None else time.monotonic() + longest_s
    while True:
        late = [rank for rank, process in started_ranks.items() if process.poll() is None]
        if not late or (deadline is not None and time.monotonic() > deadline):
            return late
        time.sleep(_TICK_S)


def _end_others() -> None:
    """Ends this process's children, but for ranks, and for what clears up behind it or was started to outlive it."""
    # CPython: removes what is left in shared memory when its process is gone.
    spared = {rank.pid for rank in started_ranks.values()} | {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    for child in psutil.Process().children():
        if child.pid not in spared:
            end_tree(child.pid)


def end_tree(pid: int) -> None:
    """Ends a process and all that it has started, but for those of a session of their own."""
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
