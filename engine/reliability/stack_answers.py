"""Answers whoever asks for the stacks of a living rank (`polyphase stacks`), from the watchdog's thread.

Each second the watchdog looks whether there is a question (`look`: one `stat` of a local file). A rank that is asked
answers with its position and the stacks of all its threads. Where ranks run on other hosts it hands the question on:
1. it writes one word to the job's store, for which the ranks of such a job look each second (one more `check`);
2. each rank publishes its answer there;
3. the rank that was asked writes down the answers of other hosts as they come.

A rank that can't answer, since some C code keeps Python's lock, is asked by a signal: see `living`.
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

from ..distributed.signing import Fields
from ..doctor.living import SIGNAL, Entry, LivingRank, remove_ended, runtime_folder
from ..environment import job_marks, job_secret
from .heartbeat import Heartbeat, stack_of
from .rank_registry import RankRegistry, this_process

__all__ = ["StackAnswers"]

log = logging.getLogger("polyphase.engine")

_ASK = "polyphase/stacks"
_ASK_FIELDS: Fields = {"by": int, "number": str}
_PATIENCE_S = 10.0
"""How long a rank that was asked waits for the answers of other hosts."""
_NUM_CALLS, _NUM_CALLS_OTHERS = 200, 50
"""Innermost calls that are told of the thread that trains, and of others; one that recurses has thousands."""
_NUM_THREADS = 64

_files: dict[int, tuple[int, int]] = {}
"""The descriptor that `faulthandler` writes to, and how many use it; by process, as a fork has to have its own."""


class StackAnswers:
    """The answers of one rank, during its run.

    Args:
        heartbeat: where the rank is.
        root: the run's `default_root_dir`.
        logs: the run's folder of logs; None where it has none, or where it is rank 0's to know.
        world_size: number of ranks.
    """

    def __init__(self, heartbeat: Heartbeat, root: str, logs: str | None, world_size: int) -> None:
        self._heartbeat = heartbeat
        self._root, self._logs, self._world_size = root, logs, world_size
        self._entry: Entry | None = None
        self._answered = ""
        self._relayed: tuple[str, set[int], float] | None = None

    def open(self) -> None:
        """Can be found from now on. Called by the thread that runs the rank."""
        folder = runtime_folder(creates=True)
        if folder is None:
            log.warning(
                "The folder for `polyphase stacks`, polyphase-%d in the folder for temporary files, is not this user's"
                " alone (mode 700): this run can't be asked for its stacks.",
                os.getuid(),
            )
            return
        with suppress(OSError, psutil.Error):  # a full disk is no reason not to train
            remove_ended(folder)
            me = {key: value for key, value in this_process().items() if key in ("host", "space", "pid")}
            rank = LivingRank(
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
        """Can be found no more."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.remove()
            _end_to_dump(entry)

    def look(self, peers: RankRegistry | None) -> None:
        """Answers if somebody asks.

        Raises:
            RuntimeError: the store's host is gone, or silent.
        """
        entry = self._entry
        asked = None if entry is None else entry.take(".ask")
        elsewhere = [] if peers is None else peers.elsewhere()
        if entry is not None and isinstance(asked, str):
            entry.write(f".answer-{asked}", {**self._answer(asked), "elsewhere": elsewhere})
            if peers is not None and elsewhere:
                self._answered = asked
                self._relayed = asked, set(elsewhere), time.monotonic() + _PATIENCE_S
                peers.job.write(_ASK, {"by": peers.rank, "number": asked})
        if peers is not None and elsewhere:
            self._answer_peers(peers)
            self._collect(peers)

    def _answer(self, number: str) -> dict[str, Any]:
        thread = self._heartbeat.thread
        told = {**this_process(), **self._heartbeat.report(), "rank": self._heartbeat.rank, "number": number}
        return {**told, "threads": _threads(thread)}

    def _answer_peers(self, peers: RankRegistry) -> None:
        """Answers what a rank of another host was asked."""
        if not peers.job.has(_ASK):
            return
        word = peers.job.read(_ASK, _ASK_FIELDS)
        if word is not None and word["number"] != self._answered:
            self._answered = word["number"]
            peers.publish("stacks", self._answer(word["number"]))

    def _collect(self, peers: RankRegistry) -> None:
        """Writes down what ranks of other hosts have answered."""
        if self._relayed is None or self._entry is None:
            return
        number, missing, deadline = self._relayed
        for rank, answer in peers.read("stacks", missing).items():
            if answer["number"] == number:
                self._entry.write(f".answer-{number}-{rank}", answer)
                missing = missing - {rank}
        self._relayed = (number, missing, deadline) if missing and time.monotonic() < deadline else None


def _threads(first: int) -> list[dict[str, Any]]:
    """Names and stacks of all threads of this process; that of the run is the first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = []
    for thread in sorted(sys._current_frames(), key=lambda each: each != first)[:_NUM_THREADS]:
        stack = stack_of(thread)[: _NUM_CALLS if thread == first else _NUM_CALLS_OTHERS]
        calls = [[call.file, call.line, call.name] for call in stack]
        threads.append({"name": names.get(thread, str(thread)), "runs": thread == first, "calls": calls})
    return threads


def _job(root: str, world_size: int) -> str:
    """The same text in all processes of a job; tells nobody the secret."""
    words = [(job_secret() or b"").decode(), *job_marks()]
    words = words if world_size > 1 else [str(os.getpid())]
    return hashlib.sha256("|".join([root, str(world_size), *words]).encode()).hexdigest()[:16]


def _begin_to_dump(folder: str) -> int | None:
    """Has this process write its stacks on a signal; returns that, None where somebody else has it."""
    me = os.getpid()
    if me in _files:
        _files[me] = _files[me][0], _files[me][1] + 1
        return SIGNAL
    if SIGNAL is None or signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return None
    path = os.path.join(folder, f"{me}.stack")
    with suppress(FileNotFoundError):
        os.remove(path)  # of a process that had this number before
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
