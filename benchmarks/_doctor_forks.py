"""Each run is a fork of a process that has imported torch and the engine, and its ranks are forks of that.

The imports take 5 seconds of CPU time in each process that makes them; a run takes 2.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["run_in_fork"]

_TICK_S = 0.02


def run_in_fork(function: Callable[[], None], log: Path, timeout_s: float) -> str | None:
    """Calls `function` in a fork that is a session of its own, which is ended with all that it has started.

    Args:
        function: whose return is the end of the fork.
        log: a file for all that it says.
        timeout_s: after which it is ended.

    Returns:
        None if it came back; else why not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_fork(function, log)
    deadline = time.monotonic() + timeout_s
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(_TICK_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return f"no end after {timeout_s:.0f} s"
    return f"it ended with {os.waitstatus_to_exitcode(status)}" if status else None


def _be_the_fork(function: Callable[[], None], log: Path) -> None:
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
