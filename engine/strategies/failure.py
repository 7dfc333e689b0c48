"""When one rank raises: that rank is named first, every other one is let go, nobody hangs.

Ranks that still train are blocked in a collective which the failed one will never join, and Lightning's exception
callbacks (a checkpoint on exception, say) would join in with barriers of their own. So, before anything else happens, a
rank that raises

1. writes its rank and error into the job's key-value store (out of band, no collective), where the first one wins;
2. prints its traceback and writes the failure report, if it is that first one; and
3. ends its process group, which makes the peers' pending collectives raise (where backward failed, when its process
   ends) and turns later barriers into no-ops.

A rank that finds another's name in the store says so and waits for its launcher to end it, so that the job's exit is
the culprit's. One whose connection broke finds out who is gone, and reports that. A peer that doesn't notice (a GPU
waits in a collective) is ended by its watchdog, or by the launcher, as each does when one of its processes fails.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from fsspec.core import url_to_fs

# Lightning: by which its tuner ends a run that went well.
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from torch.autograd.graph import _engine_run_backward  # torch: what each backward goes through

from ..version import __version__
from .job_store import JobStore
from .meeting import current_job

__all__ = ["DIED", "announce", "say", "write_report"]

DIED = "its process has ended without a word"

_GRACE_S = 2.0
"""How long a rank that stops because of another waits for its launcher to see the other's exit first."""
_LOST = re.compile("onnection (closed|reset|was|refused)|[Bb]roken pipe|[Tt]im(ed|e) ?out|[Rr]emote process|aborted")
"""What the errors say that a peer's end causes."""


def announce(
    exception: BaseException,
    *,
    print_traceback: bool = True,
    watchdog: Any = None,
    leaves: bool = False,
    finish: Callable[[], Any] = lambda: None,
) -> None:
    """Says which rank failed first, writes the report, and ends this process's group where one runs.

    Args:
        exception: what this rank raised.
        print_traceback: False where the launcher carries the traceback to the user itself.
        watchdog: the `Watchdog` of the run, which knows the other ranks; is stopped.
        leaves: the others go on without this rank, when they see that its process has ended.
        finish: called before the group ends.
    """
    if isinstance(exception, (SIGTERMException, _TunerExitException)):  # no failure: all ranks agreed to stop here
        finish()
        if watchdog is not None:
            watchdog.stop()
        return
    if watchdog is not None:
        watchdog.let_end()
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_alone = not is_connected and (watchdog is None or watchdog.world_size == 1)
    rank = dist.get_rank() if is_connected else 0 if watchdog is None else watchdog.heartbeat.rank
    if leaves and not is_alone:
        say(rank, f"failed, and leaves the other ranks to go on:\n{_traceback(exception)}")
        finish()
        _end_group(exception)  # its watchdog goes on until the process ends, and so does not say that it is done
        return
    first, is_mine = _first_failure(rank, exception, watchdog, is_alone)
    is_interrupt = isinstance(exception, KeyboardInterrupt)
    if watchdog is not None:
        if is_mine and not is_alone and not is_interrupt:  # of a process alone, the traceback says all there is
            _report(first, exception, watchdog, rank)
        watchdog.stop()
    finish()
    if not is_connected:
        return
    if is_interrupt:  # the launcher ends the others, which have been interrupted as well
        pass
    elif not is_mine or first["rank"] != rank:
        say(rank, f"stops because rank {first['rank']} failed first: {first['message']}")
        if threading.current_thread() is threading.main_thread():  # no other may set handlers, nor has the trainer then
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer's handler would only note that we are to end
        time.sleep(_GRACE_S)
    elif print_traceback:
        say(rank, f"failed and ends the run:\n{_traceback(exception)}")
    _end_group(exception)


def _end_group(exception: BaseException) -> None:
    """Ends this process's groups; after a backward that failed, their connections stay until the process ends.

    torch: who lets go last of a gloo group destroys it, and waits for the group's thread. DDP's Reducer holds Python's
    lock meanwhile, for which that thread waits in turn if a collective ends that backward had begun.
    """
    if any(frame.f_code is _engine_run_backward.__code__ for frame, _ in traceback.walk_tb(exception.__traceback__)):
        for group in list(dist.distributed_c10d._world.pg_map):  # torch: all groups that this process is in
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    with contextlib.suppress(RuntimeError):  # a group whose connections are gone already may refuse to shut down
        dist.destroy_process_group()


def _first_failure(rank: int, exception: BaseException, watchdog: Any, is_alone: bool) -> tuple[dict[str, Any], bool]:
    """The first failure of the job, and whether it is this rank's to report."""
    message = f"{type(exception).__name__}: {exception}"[:1000]
    mine = {"rank": getattr(exception, "rank", rank), "kind": "exception", "by": rank, "message": message}
    if is_alone:
        return mine, True
    try:
        job = current_job()
        if job is None:
            return mine, True
        if _LOST.search(str(exception)) and watchdog is not None:
            mine = _cause(job, watchdog, rank) or mine
        first = job.record_failure(mine)
    except RuntimeError:  # the store's host is gone
        gone = _gone(watchdog)
        first = mine = _death(gone[0], rank) if gone else mine
    return first, first == mine


def _gone(watchdog: Any) -> list[int]:
    return watchdog.peers.gone() if watchdog is not None and watchdog.peers is not None else []


def _cause(job: JobStore, watchdog: Any, rank: int) -> dict[str, Any] | None:
    """Who is to blame for a broken connection, if that turns out in time."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and job.first_failure() is None:
        gone = _gone(watchdog)
        if gone:
            return _death(gone[0], rank)
        time.sleep(0.05)
    return None


def _death(culprit: int, by: int) -> dict[str, Any]:
    return {"rank": culprit, "kind": "death", "by": by, "message": DIED}


def _report(first: dict[str, Any], exception: BaseException, watchdog: Any, rank: int) -> None:
    details = {}
    if first["kind"] == "exception":
        details = {
            "type": type(exception).__name__,
            "message": str(exception),
            "traceback": _traceback(exception),
        }
    known = watchdog.known(exception=exception)
    path = write_report(watchdog.folder, first, known, watchdog.heartbeat.resume_from, details)
    say(rank, f"the failure report is {path}")


def write_report(
    folder: str,
    failure: dict[str, Any],
    ranks: dict[int, dict[str, Any]],
    resume_from: str | None,
    details: dict[str, Any] | None = None,
) -> str:
    """Writes the JSON that says how a run ended, without any collective.

    Args:
        folder: local path or fsspec URL, created if need be.
        failure: the record of the first failure: rank, kind, message and by whom.
        ranks: what is known of each rank.
        resume_from: the newest checkpoint.
        details: of the exception.

    Returns:
        Its path, or why there is none.
    """
    now = time.time()
    report = {
        "first_failing_rank": failure["rank"],
        "kind": failure["kind"],
        "message": failure["message"],
        "exception": details or None,
        "resume_from": resume_from,
        "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "written_by": {"rank": failure["by"], "host": socket.gethostname(), "pid": os.getpid()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
        "versions": {
            "polyphase": __version__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
    }
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-rank{failure['by']}-{os.getpid()}.json"
    try:
        files, path = url_to_fs(folder)
        files.makedirs(path, exist_ok=True)
        with files.open(f"{path}/{name}", "w") as stream:
            json.dump(report, stream, indent=2, default=str)
    except Exception as error:  # a run that fails is not to fail once more over its report
        return f"not written: {type(error).__name__}: {error}"
    return f"{folder}/{name}"


def _traceback(exception: BaseException) -> str:
    return "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))


def say(rank: int, text: str) -> None:
    """Prints to standard error, at once."""
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
