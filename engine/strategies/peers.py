"""What the ranks of a run say of themselves, and whether they are still there.

Everything goes through the key-value store of the job, over a connection of its own: a thread that waits in the
trainer's one would block it. Each rank writes its own keys, and reads the others' when it has reason to.
"""

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

__all__ = ["LEFT", "Peers", "this_process"]

LEFT = "left"
"""The phase of a rank whose run is over: nobody is to wait for it."""

_STORE_TIMEOUT_S = 10.0


class Peers:
    """The ranks of a run, as one of them sees the others.

    All methods may raise RuntimeError (`torch.distributed.DistError`): the store's host is gone.

    Args:
        run: name of the run, the same on all ranks.
    """

    def __init__(self, run: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        # torch: the store under the default process group; there is no public way to it.
        store: Any = dist.distributed_c10d._get_default_store()
        self.job = store.clone()
        """The job's store, of which each run has a part."""
        self.job.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._store = dist.PrefixStore(f"polyphase/watch/{run}", self.job)
        self._number = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self.processes: dict[int, dict[str, Any]] = {}
        """Host and process id by rank, of those that have said so."""
        self._there: dict[int, psutil.Process] = {}
        """Those of this machine. They are known by what psutil has seen of them, as the clock may be set meanwhile."""
        self.last: dict[int, dict[str, Any]] = {}
        """The newest beat that was read of each rank."""
        self.me = this_process()
        self.publish("process", self.me)

    def publish(self, kind: str, content: dict[str, Any]) -> None:
        """Says something of this rank."""
        self._store.set(f"{kind}/{self.rank}", json.dumps(content))

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What those of `ranks` said that have said something; waits for nobody."""
        there = [rank for rank in ranks if self._store.check([f"{kind}/{rank}"])]
        values = self._store.multi_get([f"{kind}/{rank}" for rank in there]) if there else []
        return {rank: json.loads(value) for rank, value in zip(there, values, strict=True)}

    def beat(self, report: dict[str, Any]) -> None:
        """Publishes where this rank is."""
        self._number += 1
        self.publish("beat", {"number": self._number, **self.me, **report})
        if len(self.processes) < len(self.others):
            self.processes = self.read("process", self.others)
            for rank in filter(self.is_local, self.processes.keys() - self._there.keys()):
                with suppress(psutil.NoSuchProcess):
                    self._there[rank] = psutil.Process(self.processes[rank]["pid"])

    def beats(self) -> dict[int, dict[str, Any]]:
        """Where the other ranks are, or were when they could last be read."""
        with suppress(RuntimeError):
            self.last.update(self.read("beat", self.others))
        return self.last

    def gone(self) -> list[int]:
        """The ranks on this machine whose process has ended, though their run had not."""
        gone = [rank for rank in self.processes if self.is_local(rank) and _has_ended(self._there.get(rank))]
        return [rank for rank in gone if self.beats().get(rank, {}).get("phase") != LEFT] if gone else []

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is one of this machine and has ended; the store is not asked."""
        return self.is_local(rank) and _has_ended(self._there.get(rank))

    def silent(self, clock: float, longest_s: float) -> list[int]:
        """The ranks of other machines that have not been heard of for too long, by the caller's clock."""
        for rank, beat in self.beats().items():
            if beat["phase"] == LEFT or self.is_local(rank) or self._heard.get(rank, (0,))[0] != beat["number"]:
                self._heard[rank] = beat["number"], clock
        return [rank for rank, (_, at) in self._heard.items() if clock - at > longest_s]

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
    """By which a process of this machine can be found."""
    space = ""
    with suppress(OSError):  # of containers with one host name, each counts its processes from 1
        space = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "space": space, "pid": os.getpid()}


def _has_ended(process: psutil.Process | None) -> bool:
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
