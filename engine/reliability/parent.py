"""Ends a rank when the process that has started it has ended: rank 0, the caller of ``fit``, or torchrun's agent.

A thread checks once a second. The kernel's own signal (PR_SET_PDEATHSIG) would come when the *thread* that has started
the rank ends, and the other ranks would inherit a pipe.
"""

import os
import threading
import time

import psutil

from ..environment import parent_pid
from .failure import print_rank
from .hard_exit import hard_exit
from .rank_registry import has_ended

__all__ = ["watch_parent"]

_PERIOD_S = 1.0

_watched: set[int] = set()
"""Ids of the processes that have such a thread: a fork does not inherit the thread."""


def watch_parent(rank: int, grace_s: float) -> None:
    """Starts a thread that ends this process soon after its parent, if a parent has started it as a rank.

    Args:
        rank: rank of this process.
        grace_s: the time after the parent's end in which this process can report the reason.
    """
    pid, me = parent_pid(), os.getpid()
    if pid is None or me in _watched:
        return
    _watched.add(me)
    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        parent = None
    threading.Thread(target=_watch, args=(parent, pid, rank, grace_s), name="polyphase-parent", daemon=True).start()


def _watch(parent: psutil.Process | None, pid: int, rank: int, grace_s: float) -> None:
    while not has_ended(parent):
        time.sleep(_PERIOD_S)
    time.sleep(grace_s)
    print_rank(rank, f"ends: process {pid}, which has started it, has ended")
    hard_exit()
