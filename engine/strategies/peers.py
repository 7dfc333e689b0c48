"""What the ranks of a run say of themselves, and whether they are still there.

Everything goes through the key-value store of the job, over a connection of its own: a thread that waits in the
trainer's one would block it. Each rank writes its own keys, and reads the others' when it has reason to.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import NoneType
from typing import Any

import psutil

from .job_store import JobStore
from .signing import Fields

__all__ = ["LEFT", "Peers", "absent_ranks", "has_ended", "process_key", "this_process"]

LEFT = "left"
"""The phase of a rank whose run is over: nobody is to wait for it."""

_STORE_TIMEOUT_S = 10.0


_PROCESS: Fields = {"host": str, "space": str, "pid": int}
_PLACE: Fields = {
    "step": int,
    "batch": int,
    "evaluated": int,
    "phase": str,
    "pending": (str, NoneType),
    "line": (str, NoneType),
    "is_debugged": bool,
    "resume_from": (str, NoneType),
}
_FIELDS: dict[str, Fields] = {
    "beat": {**_PLACE, **_PROCESS, "number": int},
    "answer": {**_PLACE, "stack": str},
    "verdict": {"text": str},
    "heard": {},
}
"""By kind of word, what it must have."""


def process_key(rank: int) -> str:
    """Under which a rank says which process it is, as soon as it comes."""
    return f"polyphase/process/{rank}"


def absent_ranks(job: JobStore) -> list[int]:
    """Those that have not come yet."""
    return [rank for rank in range(job.num_ranks) if not job.has(process_key(rank))]


class Peers:
    """The ranks of a run, as one of them sees the others.

    All methods may raise RuntimeError (`torch.distributed.DistError`): the store's host is gone.

    Args:
        run: name of the run, the same on all ranks.
        job: the store of the job, of which each run has a part.
    """

    def __init__(self, run: str, job: JobStore) -> None:
        self.rank, self.world_size = job.rank, job.num_ranks
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.job = job.clone()
        self.job.store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._run = run
        self._number = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self.processes: dict[int, dict[str, Any]] = {}
        """Host and process id by rank, of those that have come."""
        self._there: dict[int, psutil.Process] = {}
        """Those of this machine. They are known by what psutil has seen of them, as the clock may be set meanwhile."""
        self.last: dict[int, dict[str, Any]] = {}
        """The newest beat that was read of each rank."""
        self.me = this_process()
        self.job.write(process_key(self.rank), self.me)

    def publish(self, kind: str, word: dict[str, Any]) -> None:
        """Writes what this rank says of itself; a later word of the same kind replaces it."""
        self.job.write(self._key(kind, self.rank), word)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Returns the latest words of this `kind` that any of `ranks` has written, by rank; waits for nobody."""
        return self._read({self._key(kind, rank): rank for rank in ranks}, _FIELDS[kind])

    def beat(self, report: dict[str, Any]) -> None:
        """Publishes where this rank is."""
        self._number += 1
        self.publish("beat", {"number": self._number, **self.me, **report})
        if len(self.processes) < len(self.others):
            self.processes = self._read({process_key(rank): rank for rank in self.others}, _PROCESS)
            for rank in filter(self.is_local, self.processes.keys() - self._there.keys()):
                with suppress(psutil.NoSuchProcess, ValueError, OverflowError):
                    self._there[rank] = psutil.Process(self.processes[rank]["pid"])

    def _key(self, kind: str, rank: int) -> str:
        return f"polyphase/watch/{self._run}/{kind}/{rank}"

    def _read(self, keys: dict[str, int], fields: Fields) -> dict[int, dict[str, Any]]:
        return {keys[key]: word for key, word in self.job.read_all(keys, fields).items()}

    @property
    def absent(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in self.others if rank not in self.processes]

    def beats(self) -> dict[int, dict[str, Any]]:
        """Where the other ranks are, or were when they could last be read."""
        with suppress(RuntimeError):
            self.last.update(self.read("beat", self.others))
        return self.last

    def gone(self) -> list[int]:
        """The ranks on this machine whose process has ended, though their run had not."""
        gone = [rank for rank in self.processes if self.is_local(rank) and has_ended(self._there.get(rank))]
        return [rank for rank in gone if self.beats().get(rank, {}).get("phase") != LEFT] if gone else []

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is one of this machine and has ended; the store is not asked."""
        return self.is_local(rank) and has_ended(self._there.get(rank))

    def silent(self, clock: float, longest_s: float) -> list[int]:
        """The ranks of other machines that have not been heard of for too long, by the caller's clock."""
        for rank, beat in self.beats().items():
            if beat["phase"] == LEFT or self.is_local(rank) or self._heard.get(rank, (0,))[0] != beat["number"]:
                self._heard[rank] = beat["number"], clock
        return [rank for rank, (_, at) in self._heard.items() if clock - at > longest_s]

    def kill(self, rank: int) -> None:
        """Ends the process of a rank of this machine."""
        process = self._there.get(rank)
        # One that has the same parent, or is that parent: a number that somebody else has put there is no rank's.
        with suppress(psutil.Error):
            me = psutil.Process()
            if process is not None and (me.ppid() in (process.ppid(), process.pid) or process.ppid() == me.pid):
                process.kill()

    def forget(self, ranks: list[int]) -> None:
        """The run goes on without these."""
        self.others = [rank for rank in self.others if rank not in ranks]
        for known in (self.processes, self._there, self.last, self._heard):
            for rank in ranks:
                known.pop(rank, None)

    def is_local(self, rank: int) -> bool:
        """Whether that rank's process can be seen from here."""
        process = self.processes.get(rank)
        return process is not None and all(process[key] == self.me[key] for key in ("host", "space"))


def this_process() -> dict[str, Any]:
    """Host, process namespace and number of this process: by these another process recognizes it."""
    space = ""
    with suppress(OSError):  # of containers with one host name, each counts its processes from 1
        space = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "space": space, "pid": os.getpid()}


def has_ended(process: psutil.Process | None) -> bool:
    """Whether a process is no more, or only waits to be counted out."""
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
