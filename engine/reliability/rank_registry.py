"""The registry of a run's ranks: the reports that they publish, and whether their processes still run.

All reports go through the job's key-value store, over a connection of its own, which the trainer's thread can't block.
Each rank writes its own keys. One store serves all ranks, so what a rank reads on each beat does not grow with their
number: a key by which it knows that all are connected, the processes of a few ranks that it does not know yet, and the
beats of a few ranks of other machines.
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

from ..distributed.environment import own_address
from ..distributed.job_store import Fields, JobStore, ProcessState, accept_probes, own_port, probe

__all__ = [
    "ALL_CONNECTED",
    "LEFT",
    "RankRegistry",
    "absent_ranks",
    "has_ended",
    "in_words",
    "process_key",
    "this_process",
]

LEFT = "left"
"""The phase of a rank whose run is over: other ranks don't wait for it."""

_STORE_TIMEOUT_S = 10.0
ALL_CONNECTED = "polyphase/process/all"
"""The key that rank 0 writes when all ranks are connected."""
_MAX_CHECKED = 8
"""The number of ranks whose keys each beat reads: of those that are not known yet, in turn, beginning with rank 0,
which may host the store, and the ones next to this rank, which are on this machine; and of those of other machines. Of
the latter, one half are always the next ones after this rank, so that a machine that is lost is noticed at once by the
ranks before its own; the other half are all the rest, in turn."""


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
    """Returns the key under which a rank publishes its process, as soon as it is connected to the store."""
    return f"polyphase/process/{rank}"


def absent_ranks(job: JobStore, ranks: Iterable[int]) -> list[int]:
    """Returns those of `ranks` that are not connected to the store yet."""
    return [rank for rank in ranks if not job.has(process_key(rank))]


class RankRegistry:
    """The ranks of a run, as one rank sees them.

    All methods may raise RuntimeError: the store's process has ended (`torch.distributed.DistError`) or does not answer
    (`StoreLostError`).

    Args:
        run: name of the run, the same on all ranks, which is a part of the keys.
        job: the store of the job.
    """

    def __init__(self, run: str, job: JobStore) -> None:
        self.rank, self.world_size = job.rank, job.num_ranks
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.job = job.clone()
        self.job.store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._run = run
        self._number = 0
        self._unknown = sorted(self.others, key=lambda rank: abs(rank - self.rank) if rank else 0)
        """The ranks whose processes are not known yet, in the order in which they are looked for."""
        self._are_all_connected = False
        self._elsewhere: list[int] = []
        """The known ranks of other machines, beginning with the one after this rank."""
        self._turn = 0
        self._last_heard: dict[int, tuple[int, float]] = {}
        """The number of each rank's last beat, and the time when that was first read."""
        self.processes: dict[int, dict[str, Any]] = {}
        """Host and process id of the other ranks that are known to be connected, by rank."""
        self._local: dict[int, psutil.Process | None] = {}
        """The processes of this machine; None for one that has ended before it was seen. psutil has noted their start
        times, so a changed clock does not matter."""
        self.last: dict[int, dict[str, Any]] = {}
        """The last beat that was read of each rank."""
        self.me = this_process()
        self.job.write(process_key(self.rank), self.me)

    def publish(self, kind: str, report: dict[str, Any]) -> None:
        """Writes a report of this rank; it replaces the former one of the same kind."""
        self.job.write(self._key(kind, self.rank), report)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Returns the latest reports of this `kind` of `ranks`, by rank; does not wait for missing ones."""
        return self._read({self._key(kind, rank): rank for rank in ranks}, _FIELDS[kind])

    def beat(self, report: dict[str, Any]) -> None:
        """Publishes the position of this rank, and looks for some of the ranks that it does not know yet."""
        accept_probes()
        self._number += 1
        self.publish("beat", {"number": self._number, **self.me, **report})
        self._look_for(self._unknown[:_MAX_CHECKED])

    def look_for_all(self) -> None:
        """Reads the processes of all ranks that are not known yet, which a rank does once, to report of them."""
        with suppress(RuntimeError):
            self._look_for(self._unknown)

    def _look_for(self, ranks: list[int]) -> None:
        if not ranks:
            return
        if len(self._unknown) > _MAX_CHECKED and not self._are_all_connected:
            self._are_all_connected = self.job.has(ALL_CONNECTED)
        seen = self._read({process_key(rank): rank for rank in ranks}, _PROCESS)
        self.processes = {**self.processes, **seen}
        due = set(ranks)
        unknown = [*(rank for rank in self._unknown if rank not in due), *ranks]
        self._unknown = [rank for rank in unknown if rank not in self.processes]
        for rank in filter(self.is_local, seen):
            self._local[rank] = None
            with suppress(psutil.NoSuchProcess, ValueError, OverflowError):
                self._local[rank] = psutil.Process(self.processes[rank]["pid"])
        elsewhere = [*self._elsewhere, *(rank for rank in seen if not self.is_local(rank))]
        self._elsewhere = sorted(elsewhere, key=lambda rank: (rank - self.rank) % self.world_size)

    def _key(self, kind: str, rank: int) -> str:
        return f"polyphase/watch/{self._run}/{kind}/{rank}"

    def _read(self, keys: dict[str, int], fields: Fields) -> dict[int, dict[str, Any]]:
        return {keys[key]: report for key, report in self.job.read_all(keys, fields).items()}

    @property
    def absent(self) -> list[int]:
        """The ranks that are not connected yet."""
        return [] if self._are_all_connected else sorted(self._unknown)

    def beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Returns the positions of the other ranks; the last known ones, if the store can't be read.

        Args:
            ranks: read those of these ranks only; None: of all.
        """
        with suppress(RuntimeError):
            self.last.update(self.read("beat", self.others if ranks is None else ranks))
        return self.last

    def _due(self) -> list[int]:
        """Returns the ranks of other machines whose beats are read now."""
        half = _MAX_CHECKED // 2
        near, rest = self._elsewhere[:half], self._elsewhere[half:]
        start = self._turn % len(rest) if rest else 0
        self._turn = start + half
        return near + (rest[start:] + rest[:start])[:half]

    def ended_ranks(self) -> list[int]:
        """Returns the ranks on this machine whose processes have ended before their run was over."""
        ended = [rank for rank, process in list(self._local.items()) if has_ended(process)]
        beats = self.beats(ended)
        return [rank for rank in ended if not _has_left(beats.get(rank))]

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is on this machine and has ended; makes no call of the store."""
        return rank in self._local and has_ended(self._local[rank])

    def silent(self, clock: float, longest_s: float) -> dict[int, float]:
        """Returns ranks of other machines without a recent beat, with the seconds since their last one.

        It looks at some of them, and at others when it is called again.

        Args:
            clock: the caller's time, in seconds.
            longest_s: the longest time between two beats.
        """
        due = self._due()
        beats = self.beats(due)
        for rank in due:
            number = beats[rank]["number"] if rank in beats else 0  # connected, and not one beat yet
            if _has_left(beats.get(rank)) or self._last_heard.get(rank, (-1,))[0] != number:
                self._last_heard[rank] = number, clock
        heard = {rank: self._last_heard[rank][1] for rank in due}
        return {rank: clock - at for rank, at in heard.items() if clock - at > longest_s}

    def probe(self, rank: int) -> ProcessState:
        """Returns the state of a rank's process on another machine; takes at most 2 s."""
        process = self.processes[rank]
        return probe(process["address"], process["port"])

    def without_heartbeat(self, ranks: list[int], patience_s: float) -> list[int]:
        """Waits `patience_s` seconds; returns those of `ranks` that have no new beat, and whose run is not over."""
        before = dict(self.read("beat", ranks))
        time.sleep(patience_s)
        after = self.read("beat", ranks)
        return [rank for rank in ranks if after.get(rank) == before.get(rank) and not _has_left(after.get(rank))]

    def on_other_hosts(self, address: str | None = None) -> list[int]:
        """Returns the running ranks of other machines; of the one with this address or name, if it is given."""
        ranks = [rank for rank in sorted(self._elsewhere) if not _has_left(self.last.get(rank))]
        places = {rank: (self.processes[rank]["address"], self.processes[rank]["host"]) for rank in ranks}
        return [rank for rank in ranks if address is None or address in places[rank]]

    def hosts(self, ranks: list[int]) -> str:
        """Describes the machines of `ranks` for a message."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.processes[rank]["host"], []).append(rank)
        return " and ".join(f"host {host} ({in_words(ranks)})" for host, ranks in by_host.items())

    def kill(self, rank: int) -> None:
        """Ends the process of a rank of this machine."""
        process = self._local.get(rank)
        # Only a process with the same parent, the parent or a child: the process id may be forged.
        with suppress(psutil.Error):
            me = psutil.Process()
            if process is not None and (me.ppid() in (process.ppid(), process.pid) or process.ppid() == me.pid):
                process.kill()

    def forget(self, ranks: list[int]) -> None:
        """Drops ranks without which the run continues."""
        gone = set(ranks)
        self.others, self._unknown, self._elsewhere = (
            [rank for rank in kind if rank not in gone] for kind in (self.others, self._unknown, self._elsewhere)
        )
        for by_rank in (self.processes, self._local, self.last, self._last_heard):
            for rank in ranks:
                by_rank.pop(rank, None)

    def is_local(self, rank: int) -> bool:
        """Whether a rank's process is on this machine, in the same process namespace."""
        process = self.processes.get(rank)
        return process is not None and all(process[key] == self.me[key] for key in ("host", "space"))


def this_process() -> dict[str, Any]:
    """Returns host, process namespace and id of this process, and the address and port at which it can be probed."""
    space = ""
    with suppress(OSError):  # containers with the same host name each number their processes from 1
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
    """Whether a process has ended; a zombie has, too."""
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
