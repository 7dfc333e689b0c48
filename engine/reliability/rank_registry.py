"""The reports that the ranks of a run write about themselves, and checks whether they are still there.

Everything goes through the key-value store of the job, over a connection of its own: a thread that waits in the
trainer's one would block it. Each rank writes its own keys, and reads the others' when it has reason to.
"""

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import NoneType
from typing import Any

import psutil

from ..distributed.host_liveness import Sign, answer, own_port, ring
from ..distributed.job_store import JobStore
from ..distributed.signing import Fields
from ..environment import own_address

__all__ = ["LEFT", "RankRegistry", "absent_ranks", "has_ended", "in_words", "process_key", "this_process"]

LEFT = "left"
"""The phase of a rank whose run is over: nobody is to wait for it."""

_STORE_TIMEOUT_S = 10.0
_AT_A_TIME = 8
"""Ranks that are asked for one by one until all have come: if each asked for all others, a large job's store would
have as many questions as it has pairs of ranks."""


_PROCESS: Fields = {"host": str, "space": str, "pid": int, "address": str, "port": int}
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
    "stacks": {**_PLACE, **_PROCESS, "number": str, "threads": list},
    "verdict": {"text": str},
    "heard": {},
}
"""The fields that each kind of report must have."""


def process_key(rank: int) -> str:
    """Under which a rank says which process it is, as soon as it comes."""
    return f"polyphase/process/{rank}"


def absent_ranks(job: JobStore) -> list[int]:
    """Those that have not come yet."""
    return [rank for rank in range(job.num_ranks) if not job.has(process_key(rank))]


class RankRegistry:
    """The ranks of a run, as one of them sees the others.

    All methods may raise RuntimeError: the store's host is gone (`torch.distributed.DistError`), or silent
    (`StoreLostError`).

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
        self._asked_for = -1
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
        answer()
        self._number += 1
        self.publish("beat", {"number": self._number, **self.me, **report})
        if absent := self.absent:
            if len(absent) > _AT_A_TIME and not self.job.has(*map(process_key, absent)):
                absent = ([rank for rank in absent if rank > self._asked_for] + absent)[:_AT_A_TIME]
                self._asked_for = absent[-1]
            processes = self._read({process_key(rank): rank for rank in absent}, _PROCESS)
            self.processes = {**self.processes, **processes}
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
        """Returns the positions of the other ranks, or the last ones that could be read."""
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

    def silent(self, clock: float, longest_s: float) -> dict[int, float]:
        """For how long the ranks of other machines have not been heard of that are silent for too long.

        Args:
            clock: the caller's, in seconds.
            longest_s: how long a rank may be silent.
        """
        for rank, beat in self.beats().items():
            if beat["phase"] == LEFT or self.is_local(rank) or self._heard.get(rank, (0,))[0] != beat["number"]:
                self._heard[rank] = beat["number"], clock
        return {rank: clock - at for rank, (_, at) in self._heard.items() if clock - at > longest_s}

    def sign(self, rank: int) -> Sign:
        """Asks the kernel of another machine for the state of a rank; waits for the answer."""
        process = self.processes[rank]
        return ring(process["address"], process["port"])

    def mute(self, ranks: list[int], patience_s: float) -> list[int]:
        """The `ranks` that run and have no heartbeat in the next `patience_s` seconds; waits for these."""
        before = dict(self.read("beat", ranks))
        time.sleep(patience_s)
        after = self.read("beat", ranks)
        return [rank for rank in ranks if after.get(rank) == before.get(rank) and not _has_left(after.get(rank))]

    def elsewhere(self, address: str | None = None) -> list[int]:
        """The ranks of other machines that run; of the one with that address, or name, if it is given."""
        ranks = [rank for rank in self.processes if not (self.is_local(rank) or _has_left(self.last.get(rank)))]
        places = {rank: (self.processes[rank]["address"], self.processes[rank]["host"]) for rank in ranks}
        return [rank for rank in ranks if address is None or address in places[rank]]

    def hosts(self, ranks: list[int]) -> str:
        """The machines of `ranks`, in words."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.processes[rank]["host"], []).append(rank)
        return " and ".join(f"host {host} ({in_words(ranks)})" for host, ranks in by_host.items())

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
        for by_rank in (self.processes, self._there, self.last, self._heard):
            for rank in ranks:
                by_rank.pop(rank, None)

    def is_local(self, rank: int) -> bool:
        """Whether that rank's process can be seen from here."""
        process = self.processes.get(rank)
        return process is not None and all(process[key] == self.me[key] for key in ("host", "space"))


def this_process() -> dict[str, Any]:
    """Host, process namespace and number of this process: by these another process recognizes it; and its doorbell."""
    space = ""
    with suppress(OSError):  # of containers with one host name, each counts its processes from 1
        space = os.readlink("/proc/self/ns/pid")
    address = own_address()
    process = {"host": socket.gethostname(), "space": space, "pid": os.getpid()}
    return {**process, "address": address, "port": own_port(address)}


def _has_left(beat: dict[str, Any] | None) -> bool:
    return beat is not None and beat["phase"] == LEFT


def in_words(ranks: list[int]) -> str:
    """``[0, 2, 3, 4]`` -> ``"ranks 0, 2-4"``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)


def has_ended(process: psutil.Process | None) -> bool:
    """Whether a process is no more, or only waits to be counted out."""
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
