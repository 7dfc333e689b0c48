"""Ends all ranks when one of them raises an exception, and names that rank once.

The other ranks wait in a collective that the failed rank never joins, and Lightning's callbacks on an exception (one
that saves a checkpoint, say) would wait in barriers of their own. So a rank that raises does this first: it

1. records its rank and error in the job's key-value store, without a collective; only the first record counts;
2. writes the failure report, if its record is the first; otherwise it publishes its traceback in the store;
3. ends its process group, so that the pending collectives of other ranks raise (if backward failed, when its process
   ends) and later barriers do nothing; and
4. if its record is the first, waits a moment for the other ranks' tracebacks, adds them to the report, and prints which
   rank failed, which stopped because of it, the path of the report, and the user's frames of its traceback.

A rank that finds another rank's record prints nothing, and waits for its launcher to end it, so that the job has the
exit code of the culprit. A rank whose connection broke looks for the process that has ended, and reports that. A rank
that does not notice (a GPU waits in a collective) is ended by its watchdog or by the launcher.

In a process without other ranks Python prints the exception, if nobody catches it, and there is no report.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import torch.distributed as dist

# Lightning: its tuner ends a successful run with it.
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .._compat.lightning import _ChildProcessObserver, _TunerExitException
from .._compat.torch import _engine_run_backward
from ..distributed.environment import parent_pid
from ..distributed.job_store import FIRST_FAILURE, CausedByRank, JobStore
from .flight_recorder import recorded
from .hard_exit import hard_exit
from .rendezvous import Recorded, current_job, has_ended, in_words
from .report import DIED, Report, because, blame, connection_lost
from .tracebacks import Failure, on_uncaught, shown

__all__ = [
    "DONE",
    "TOLD",
    "Wakeup",
    "delay_the_kill",
    "is_of_connection",
    "print_rank",
    "report_failure",
    "watch_parent",
]


# --- detects SIGTERM while its Python handler can't run, because the main thread waits in C++
# Python calls signal handlers in the main thread, between two instructions; a wait for a collective is one instruction.
# But Python's C handler writes the number of each signal to a socket at once, which another thread can read.


class Wakeup:
    """Detects whether this process has received SIGTERM.

    It begins and ends in the main thread. In another thread, or if other code uses Python's socket for signals, it
    detects nothing.
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._was_asked = False

    def begin(self) -> None:
        """Begins to detect signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        before = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        self._ends = ends
        if before != -1:
            signal.set_wakeup_fd(before)
            self.end()

    def end(self) -> None:
        """Restores Python's former socket; signals that have come until now stay known."""
        self.was_asked_to_end()
        ends, self._ends = self._ends, None
        if ends is None:
            return
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, ends[1].fileno()):
                signal.set_wakeup_fd(before)  # other code has set it meanwhile
        for end in ends:
            end.close()

    def was_asked_to_end(self) -> bool:
        """Whether SIGTERM has come since `begin`."""
        if self._ends is not None and not self._was_asked:
            with suppress(OSError):
                self._was_asked = signal.SIGTERM in self._ends[0].recv(4096)
        return self._was_asked


DONE = f"{FIRST_FAILURE}/done"
"""Counter of the ranks that know of the failure, an exception, and make no further call of the store. It only shortens
a wait with a time limit: if a process that is not a rank changes it, a rank waits too briefly, or until the limit."""

_GRACE_S = 2.0
"""The time that a rank waits before it stops because of a failed rank: the launcher should see that one exit first."""
_TELLING_S = 10.0
"""The longest time that such a rank waits, before that, until the failed rank has printed what happened."""
_COLLECT_S = 1.0
"""The time that the rank that failed first waits for the other ranks' tracebacks."""
_HOST_S = 3.0
"""The longest time that this rank waits until the others no longer need the store, which its process may host."""
_POLL_S = 0.05
TOLD = f"{FIRST_FAILURE}/told"
"""Key that the rank which failed first writes when it has printed what happened, and whether that has the error: else
its launcher raises it, if the process comes so far."""
_NUMBER = f"{FIRST_FAILURE}/number"
"""Counter of the ranks that have published their tracebacks."""
_LOST = re.compile("onnection (closed|reset|was|refused)|[Bb]roken pipe|[Tt]im(ed|e) ?out|[Rr]emote process|aborted")
"""Matches the messages of errors that the end of another rank causes."""


def is_of_connection(error: BaseException) -> bool:
    """Whether the end of another rank may have raised an error."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def report_failure(
    exception: BaseException,
    *,
    print_traceback: bool = True,
    watchdog: Any = None,
    leaves: bool = False,
    finish: Callable[[], Any] = lambda: None,
) -> None:
    """Names the rank that failed first, writes the report, and ends this process's group if it has one.

    Args:
        exception: raised by this rank.
        print_traceback: False if the launcher shows the traceback to the user.
        watchdog: the `Watchdog` of the run, which knows the other ranks; it is stopped.
        leaves: whether the other ranks continue without this one, when they see that its process has ended.
        finish: called before the group ends.
    """
    _ends_by_itself.set()
    if isinstance(exception, (SIGTERMException, _TunerExitException)):  # no failure: all ranks agreed to stop here
        finish()
        if watchdog is not None:
            watchdog.stop()
        return
    if watchdog is not None:
        watchdog.wait_for_verdict()
    rank, is_alone = _this_rank(watchdog)
    if leaves and not is_alone:
        _leave(rank, exception, finish)
        return
    first, is_first = _first_failure(rank, exception, watchdog, is_alone)
    is_interrupt = first["message"].startswith("KeyboardInterrupt")
    # The traceback of a single process is complete, for its caller too: the trials of a sweep leave no reports. Who
    # calls `sys.exit` ends the run on purpose, as a scheduler's handler of signals does that has requeued the job.
    is_silent = watchdog is None or is_interrupt or is_alone or not is_first or isinstance(exception, SystemExit)
    report = None if is_silent else _report(first, exception, watchdog)
    if report is not None:
        report.write()  # at once: this process may be ended
    job = None if is_alone else current_job()
    if watchdog is not None and (job is None or is_first):  # a rank that follows goes on to listen for signals
        watchdog.stop()
    if job is None:  # alone; or the ranks are not connected yet
        finish()
        on_uncaught(exception, Failure(is_interrupt=is_interrupt, print_details=partial(_say_where, rank, report)))
        return
    if is_first:
        finish()
        _end_group(exception)
        _tell(job, first, exception, report, print_traceback=print_traceback)
    else:
        _follow(job, rank, first, exception, finish, watchdog)
    on_uncaught(exception, Failure(is_printed=True, is_interrupt=is_interrupt))


def _this_rank(watchdog: Any) -> tuple[int, bool]:
    """Returns this rank, and whether there is no other one."""
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_alone = not is_connected and (watchdog is None or watchdog.world_size == 1)
    return dist.get_rank() if is_connected else 0 if watchdog is None else watchdog.heartbeat.rank, is_alone


def _leave(rank: int, exception: BaseException, finish: Callable[[], Any]) -> None:
    """Prints the failure of a rank that the others do not need, and ends its group."""
    print_rank(rank, f"failed; the other ranks continue:\n{shown(exception).rstrip()}")
    on_uncaught(exception, Failure(is_printed=True))
    finish()
    _end_group(exception)  # the watchdog is not stopped, since it would publish that this rank's run is over


def _follow(
    job: Any, rank: int, first: dict[str, Any], exception: BaseException, finish: Callable[[], Any], watchdog: Any
) -> None:
    """Stops this rank because another one has failed first."""
    requests = _listening() if watchdog is None else watchdog.stop_but_listen()
    # If the failed rank has ended, or no longer waits for this one, it has printed everything. It may have hosted the
    # store, so the store is not used any more.
    peers = None if watchdog is None else watchdog.peers
    if (peers is not None and peers.has_ended(first["by"])) or (watchdog is not None and watchdog.is_done_with_store):
        job = None
    _stop_because_of(job, rank, first, exception, finish, requests)


def _listening() -> Wakeup:
    requests = Wakeup()
    requests.begin()
    return requests


def _tell(
    job: JobStore,
    first: dict[str, Any],
    exception: BaseException,
    report: Report | None,
    *,
    print_traceback: bool,
) -> None:
    """Collects the messages of other ranks that failed as well, completes the report and prints."""
    me, culprit, world_size = first["by"], first["rank"], job.num_ranks
    others = [rank for rank in range(world_size) if rank not in (me, culprit)]
    messages = _collected(job, [rank for rank in range(world_size) if rank != me])
    if report is not None and messages:
        report.add(messages)
    by_end: dict[str, list[int]] = {"failed with the same error": [], "stopped because of it": []}
    for rank in others:
        is_same = rank in messages and messages[rank]["message"] == first["message"]
        by_end["failed with the same error" if is_same else "stopped because of it"].append(rank)
    consequences = "".join(f"; {in_words(ranks)} {end}" for end, ranks in by_end.items() if ranks)
    if first["kind"] != "exception":
        print_rank(me, f"ends the run {blame(first)}{consequences}{_about(report)}")
    elif isinstance(exception, KeyboardInterrupt):
        print_rank(me, "was interrupted (Ctrl-C), so the run ends")
    else:
        text = f"\n{shown(exception).rstrip()}" if print_traceback else ""
        ends = "failed and ends the run" if me == culprit else f"ends the run because of rank {culprit}"
        print_rank(me, f"{ends}{consequences}{_about(report)}{text}")
    with contextlib.suppress(RuntimeError):  # the store's host is gone
        job.write(TOLD, {"by": me, "in_full": print_traceback})
        if me == 0:
            _await(job, DONE, world_size - 1, _HOST_S)


def _collected(job: JobStore, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Returns the messages and tracebacks of those of `ranks` that failed as well, within a moment."""
    keys = {f"{FIRST_FAILURE}/{rank}": rank for rank in ranks}
    try:
        _await(job, _NUMBER, len(ranks), _COLLECT_S)
        fields = {"message": str, "traceback": str, "collectives": Recorded | None}
        return {keys[key]: word for key, word in job.read_all(keys, fields).items()}
    except RuntimeError:  # the store's host is gone
        return {}


def _await(job: JobStore, counter: str, number: int, patience_s: float) -> None:
    """Waits until `counter` has reached `number`, for at most `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while job.count(counter) < number and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _stop_because_of(
    job: JobStore | None,
    rank: int,
    first: dict[str, Any],
    exception: BaseException,
    finish: Callable[[], Any],
    requests: Wakeup,
) -> None:
    """Publishes this rank's traceback, and waits until the rank that failed first has printed everything.

    `requests` detects a SIGTERM, which the trainer's handler only notes, and ends here.
    """
    own_failure = {"message": _message(exception), "traceback": _traceback(exception), "collectives": recorded()}
    has_told = job is None
    with contextlib.suppress(RuntimeError):  # the store's host is gone
        if job is not None:
            job.write(f"{FIRST_FAILURE}/{rank}", own_failure)
            job.count(_NUMBER, 1)
    finish()
    if threading.current_thread() is threading.main_thread():  # only it may set handlers; else the trainer set none
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from now on a request ends this process
    requests.end()
    with contextlib.suppress(RuntimeError):
        if job is not None:
            has_told = _has_told(job)
    if not has_told:
        print_rank(rank, f"stops because {because(first, rank)}")
    if not requests.was_asked_to_end():  # the launcher asks once it has seen the other's exit
        time.sleep(_GRACE_S)
    _end_group(exception)


def _has_told(job: JobStore) -> bool:
    """Waits until the rank that failed first has printed what happened; returns whether it has, in time."""
    deadline = time.monotonic() + _TELLING_S
    while job.read(TOLD, {"by": int}) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    job.count(DONE, 1)
    return True


def _say_where(rank: int, report: Report | None) -> None:
    """Prints the path of the report, for a rank that is not connected to others, before Python prints the traceback."""
    if report is not None:
        report.write()
        print_rank(rank, f"failed{_about(report)}")


def _about(report: Report | None) -> str:
    """The sentences about a report: in what the ranks differ, what to do, and where it is; none without a report."""
    if report is None:
        return ""
    sentences = [f"The collectives differ: {difference}" for difference in report.mismatches]
    sentences += [] if report.what_to_do is None else [f"What to do: {report.what_to_do}"]
    return "".join(f". {sentence}" for sentence in (*sentences, f"The failure report, with all frames: {report.where}"))


def _end_group(exception: BaseException) -> None:
    """Ends this process's groups; after a backward that failed, their connections stay until the process ends.

    torch: the last owner of a gloo group destroys it, and waits for the group's thread. DDP's Reducer holds Python's
    lock meanwhile, and that thread waits for the lock if a collective of backward ends.
    """
    if any(frame.f_code is _engine_run_backward.__code__ for frame, _ in traceback.walk_tb(exception.__traceback__)):
        for group in list(dist.distributed_c10d._world.pg_map):  # torch: all groups that this process is in
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    with contextlib.suppress(RuntimeError):  # a group whose connections are gone already may refuse to shut down
        if dist.is_initialized():
            # torch: as destroy_process_group, by which NCCL would wait for collectives that nobody joins any more.
            dist.distributed_c10d._abort_process_group()


def _first_failure(rank: int, exception: BaseException, watchdog: Any, is_alone: bool) -> tuple[dict[str, Any], bool]:
    """The first failure of the job, and whether this rank reports it."""
    culprit = exception.rank if isinstance(exception, CausedByRank) else rank
    own_failure = {"rank": culprit, "kind": "exception", "by": rank, "message": _message(exception)}
    if is_alone:
        return own_failure, True
    if watchdog is not None and watchdog.first_failure is not None:
        return watchdog.first_failure, False
    try:
        job = current_job()
        if job is None:
            return own_failure, True
        if _LOST.search(str(exception)) and watchdog is not None:
            own_failure = _cause(job, watchdog, rank) or _elsewhere(exception, watchdog, rank) or own_failure
        first = job.record_failure(own_failure)
    except RuntimeError:  # the store's host is gone, or silent
        gone = _gone(watchdog)
        if gone:
            own_failure = _death(gone[0], rank)
        elif _LOST.search(str(exception)):
            own_failure = _elsewhere(exception, watchdog, rank) or own_failure
        first = own_failure
    return first, first == own_failure


def _gone(watchdog: Any) -> list[int]:
    return watchdog.peers.ended_ranks() if watchdog is not None and watchdog.peers is not None else []


def _cause(job: JobStore, watchdog: Any, rank: int) -> dict[str, Any] | None:
    """Returns the failure that has broken a connection, if it is known in time."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and job.first_failure() is None:
        gone = _gone(watchdog)
        if gone:
            return _death(gone[0], rank)
        time.sleep(0.05)
    return None


def _elsewhere(exception: BaseException, watchdog: Any, rank: int) -> dict[str, Any] | None:
    peers = None if watchdog is None else watchdog.peers
    return None if peers is None else connection_lost(peers, exception, rank)


def _death(culprit: int, reporter: int) -> dict[str, Any]:
    return {"rank": culprit, "kind": "death", "by": reporter, "message": DIED}


def _report(first: dict[str, Any], exception: BaseException, watchdog: Any) -> Report:
    details = {}
    reports = watchdog.positions_of_all(exception=exception)
    if first["kind"] == "exception":
        details = {
            "type": type(exception).__name__,
            "message": str(exception),
            "traceback": _traceback(exception),
        }
    else:  # of another rank, which this one has found
        reports[first["by"]] |= {"message": _message(exception), "traceback": _traceback(exception)}
    return Report(watchdog.folder, first, reports, watchdog.heartbeat.resume_from, details, watchdog.heartbeat.run_id)


def _message(exception: BaseException) -> str:
    return f"{type(exception).__name__}: {exception}"[:1000]


def _traceback(exception: BaseException) -> str:
    return "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))


def print_rank(rank: int, text: str) -> None:
    """Prints to standard error, at once."""
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


# --- delays the kill of the process that has started the other ranks, so that it can report why one of them ended


_END_TIMEOUT_S = 4.0
"""The time that this process continues after a rank that it has started has ended."""
_OWN_END_S = 60.0
"""The additional time if its own run has failed: to save, to call callbacks, to close loggers."""

_ends_by_itself = threading.Event()
"""Set when this process's own run has failed: the process ends by itself, with a more precise exit code."""


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


# --- ends a rank when the process that has started it has ended: rank 0, the caller of ``fit``, or torchrun's agent
# A thread checks once a second. The kernel's own signal (PR_SET_PDEATHSIG) would come when the *thread* that has
# started the rank ends, and the other ranks would inherit a pipe.


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
