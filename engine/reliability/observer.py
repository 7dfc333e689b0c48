"""Delays the kill of the process that has started the other ranks, so that it can report why one of them ended."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Lightning: the thread that watches the processes which this one has started.
from .._compat.lightning import _ChildProcessObserver

__all__ = ["delay_the_kill", "note_own_end"]

_END_TIMEOUT_S = 4.0
"""The time that this process continues after a rank that it has started has ended."""
_OWN_END_S = 60.0
"""The additional time if its own run has failed: to save, to call callbacks, to close loggers."""

_ends_by_itself = threading.Event()


def note_own_end() -> None:
    """Called when this process's own run has failed: the process ends by itself, with a more precise exit code."""
    _ends_by_itself.set()


def delay_the_kill(rank: int, can_lose: Callable[[int], bool]) -> None:
    """Delays Lightning's observer, so that this process can find out what happened and end by itself.

    Child processes without which the run can continue are no longer observed.
    """
    _ends_by_itself.clear()  # an earlier run may have failed with an exception that was caught
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver) and "_terminate_all" not in vars(thread):
            kill = thread._terminate_all  # Lightning: sends SIGKILL to all processes, this one too
            thread._terminate_all = partial(_late, kill)  # type: ignore[method-assign]
            # Lightning: the processes that are observed, of the ranks that follow this one's.
            children: Any = thread._child_processes
            thread._child_processes = [c for other, c in enumerate(children, rank + 1) if not can_lose(other)]


def _late(kill: Callable[[], None]) -> None:
    time.sleep(_END_TIMEOUT_S)
    if _ends_by_itself.is_set():
        time.sleep(_OWN_END_S)
    kill()
