"""Serves requests for the stacks of running ranks (`polyphase stacks`), on the watchdog's thread.

Each second the watchdog checks for a request (`poll`: one `stat` of a local file). The rank answers with its position
and the stacks of all its threads. If there are ranks on other hosts, it forwards the request:
1. It writes a message to the job's store, which the ranks of such a job check each second (one more `check`).
2. Each rank publishes its answer there.
3. The rank that got the request writes the answers of other hosts to local files.

If a rank can't answer, because C code holds Python's lock, `polyphase stacks` sends it a signal: see
`stacks.py`.
"""

import faulthandler
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from ..distributed.environment import job_marks, job_secret
from ..distributed.job_store import Fields
from .heartbeat import Heartbeat, stack_of
from .rendezvous import RankRegistry, this_process
from .stacks import SIGNAL, Entry, RunningRank, remove_ended, runtime_folder

__all__ = ["StackAnswers"]

log = logging.getLogger("polyphase.engine")

_ASK = "polyphase/stacks"
_ASK_FIELDS: Fields = {"by": int, "number": str}
_PATIENCE_S = 10.0
"""The seconds that a rank waits for the answers of other hosts."""
_NUM_CALLS, _NUM_CALLS_OTHERS = 200, 50
"""The number of innermost frames in an answer, for the thread that trains and for others; recursion has thousands."""
_NUM_THREADS = 64

_files: dict[int, tuple[int, int]] = {}
"""The descriptor that `faulthandler` writes to, and its number of users, by process id: a fork needs its own."""


class StackAnswers:
    """The answers of one rank, during its run.

    Args:
        heartbeat: the position of the rank.
        root: the run's `default_root_dir`.
        logs: the run's folder of logs; None if it has none, or on other ranks than rank 0.
        world_size: number of ranks.
    """

    def __init__(self, heartbeat: Heartbeat, root: str, logs: str | None, world_size: int) -> None:
        self._heartbeat = heartbeat
        self._root, self._logs, self._world_size = root, logs, world_size
        self._entry: Entry | None = None
        self._answered = ""
        self._relayed: tuple[str, set[int], float] | None = None

    def open(self) -> None:
        """Registers the rank, so that `polyphase stacks` finds it; called by the thread that runs the rank."""
        folder = runtime_folder(creates=True)
        if folder is None:
            log.warning(
                "The folder for `polyphase stacks`, polyphase-%d in the folder for temporary files, is not this user's"
                " alone (mode 700): this run can't be asked for its stacks.",
                os.getuid(),
            )
            return
        with suppress(OSError, psutil.Error):  # a full disk must not stop the training
            remove_ended(folder)
            me = {key: value for key, value in this_process().items() if key in ("host", "space", "pid")}
            rank = RunningRank(
                root=self._root,
                logs=self._logs,
                job=_job(self._root, self._world_size),
                rank=self._heartbeat.rank,
                world_size=self._world_size,
                **me,
                created=psutil.Process().create_time(),
                thread=threading.get_ident(),
                signal=_begin_to_dump(folder),
            )
            self._entry = Entry.new(folder, rank)

    def close(self) -> None:
        """Removes the registration."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.remove()
            _end_to_dump(entry)

    def poll(self, peers: RankRegistry | None) -> None:
        """Answers a request, if there is one.

        Raises:
            RuntimeError: the store's process has ended, or does not answer.
        """
        entry = self._entry
        request = None if entry is None else entry.take(".ask")
        if request is not None and peers is not None:
            peers.look_for_all()
        elsewhere = [] if peers is None else peers.on_other_hosts()
        if entry is not None and isinstance(request, str):
            entry.write(f".answer-{request}", {**self._answer(request), "elsewhere": elsewhere})
            if peers is not None and elsewhere:
                self._answered = request
                self._relayed = request, set(elsewhere), time.monotonic() + _PATIENCE_S
                peers.job.write(_ASK, {"by": peers.rank, "number": request})
        if peers is not None and elsewhere:
            self._answer_peers(peers)
            self._collect(peers)

    def _answer(self, number: str) -> dict[str, Any]:
        thread = self._heartbeat.thread
        report = {**this_process(), **self._heartbeat.report(), "rank": self._heartbeat.rank, "number": number}
        return {**report, "threads": _threads(thread)}

    def _answer_peers(self, peers: RankRegistry) -> None:
        """Answers a request that a rank of another host has forwarded."""
        if not peers.job.has(_ASK):
            return
        request = peers.job.read(_ASK, _ASK_FIELDS)
        if request is not None and request["number"] != self._answered:
            self._answered = request["number"]
            peers.publish("stacks", self._answer(request["number"]))

    def _collect(self, peers: RankRegistry) -> None:
        """Writes the answers of ranks of other hosts to local files."""
        if self._relayed is None or self._entry is None:
            return
        number, missing, deadline = self._relayed
        for rank, answer in peers.read("stacks", missing).items():
            if answer["number"] == number:
                self._entry.write(f".answer-{number}-{rank}", answer)
                missing = missing - {rank}
        self._relayed = (number, missing, deadline) if missing and time.monotonic() < deadline else None


def _threads(first: int) -> list[dict[str, Any]]:
    """Returns the names and stacks of all threads of this process, the thread `first` at the beginning."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = []
    for thread in sorted(sys._current_frames(), key=lambda thread: thread != first)[:_NUM_THREADS]:
        stack = stack_of(thread)[: _NUM_CALLS if thread == first else _NUM_CALLS_OTHERS]
        calls = [[call.file, call.line, call.name] for call in stack]
        threads.append({"name": names.get(thread, str(thread)), "runs": thread == first, "calls": calls})
    return threads


def _job(root: str, world_size: int) -> str:
    """Returns an id that all processes of a job have in common; a hash, so that it does not reveal the secret."""
    marks = [os.fsdecode(job_secret() or b""), *job_marks()]
    marks = marks if world_size > 1 else [str(os.getpid())]
    return hashlib.sha256(os.fsencode("|".join([root, str(world_size), *marks]))).hexdigest()[:16]


def _begin_to_dump(folder: str) -> int | None:
    """Makes this process write its stacks on a signal; returns the signal, None if other code handles it."""
    me = os.getpid()
    if me in _files:
        _files[me] = _files[me][0], _files[me][1] + 1
        return SIGNAL
    if SIGNAL is None or signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return None
    path = os.path.join(folder, f"{me}.stack")
    with suppress(FileNotFoundError):
        os.remove(path)  # of a former process with this id
    _files[me] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600), 1
    faulthandler.register(SIGNAL, file=_files[me][0], all_threads=True)
    return SIGNAL


def _end_to_dump(entry: Entry) -> None:
    me = os.getpid()
    if entry.rank.signal is None or me not in _files:
        return
    file, users = _files[me]
    if users > 1:
        _files[me] = file, users - 1
        return
    del _files[me]
    faulthandler.unregister(entry.rank.signal)
    os.close(file)
    with suppress(FileNotFoundError):
        os.remove(entry.stack_file)
