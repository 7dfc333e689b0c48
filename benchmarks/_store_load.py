"""What ranks ask the job's store for, a second: the engine's own functions against a store that counts, no processes.

Some ranks of a job are driven by a simulated clock, a beat of the watchdog and a boundary between steps each second;
what the others have written stands in the store. The store serves as many such ranks as there are.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from polyphase.engine.distributed.job_store import JobStore, SignedStore
from polyphase.engine.reliability.rendezvous import ALL_CONNECTED, RankRegistry, _process_key, this_process
from polyphase.engine.reliability.signals import _StopConsensus
from polyphase.engine.reliability.stack_answers import StackAnswers
from polyphase.engine.reliability.watchdog import Watchdog

__all__ = ["CountingStore", "Load", "loads"]

RANKS_OF_A_HOST = 8
PLACE = {"step": 1, "batch": 1, "evaluated": 0, "phase": "train", "line": None, "units": None}
REPORT = {**PLACE, "is_debugged": False, "resume_from": None}


@dataclass
class Load:
    """What one rank asks for, a second."""

    calls: float = 0.0
    keys: float = 0.0
    read_bytes: float = 0.0


@dataclass
class CountingStore:
    """A store in this process that counts what it is asked for; it has the methods of torch's that the engine calls."""

    values: dict[str, bytes] = field(default_factory=dict)
    count: Load = field(default_factory=Load)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method; a connection to the store does the same in a thread of its own."""
        return getattr(self, method)(*arguments)

    def _note(self, keys: int, values: list[bytes]) -> None:
        self.count.calls += 1
        self.count.keys += keys
        self.count.read_bytes += sum(map(len, values))

    def set(self, key: str, value: bytes) -> None:
        self._note(1, [])
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._note(1, [self.values[key]])
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._note(len(keys), [])
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self.values[key] for key in keys]
        self._note(len(keys), values)
        return values

    def set_timeout(self, timeout: Any) -> None:
        """There is nothing to wait for."""


class Driven:
    """One rank: its watchdog, its answers to requests of stacks, and its look whether the run stops."""

    def __init__(self, store: CountingStore, rank: int, num_ranks: int, now: Callable[[], float]) -> None:
        self.now = now
        self.heartbeat = SimpleNamespace(rank=rank, report=lambda: dict(self.report), place=lambda: dict(self.place))
        self.report: dict[str, Any] = {**REPORT, "pending": None}
        self.place: dict[str, Any] = {}
        answers = StackAnswers(self.heartbeat, ".", None, num_ranks)  # type: ignore[arg-type]
        self.watchdog = Watchdog(self.heartbeat, 1800.0, ".", num_ranks, answers=answers)  # type: ignore[arg-type]
        self.watchdog.peers = peers = RankRegistry("0", job_of(store, rank, num_ranks))
        peers.me = process_of(rank)
        signed = SignedStore.__new__(SignedStore)
        vars(signed).update(_line=store, _rank=rank, _has_warned=False)
        self.consensus = _StopConsensus(signed, rank, num_ranks)
        self.due = 0.0

    def second(self, number: int, *, waits: bool) -> None:
        """What is due until the clock's present time."""
        self.place = {**PLACE, "step": 0 if waits else number}
        self.report |= {**self.place, "pending": "all_reduce" if waits else None}
        watchdog: Any = self.watchdog
        while self.due <= self.now():
            watchdog._tick()
            watchdog._check()
            watchdog._serve_requests()
            self.due += watchdog._period_s()
        if not waits:
            self.consensus.should_stop(number, False)


def job_of(store: CountingStore, rank: int, num_ranks: int) -> JobStore:
    """The job's store of a rank, without a thread for its connection."""
    job = JobStore.__new__(JobStore)
    vars(job).update(store=store, line=store, rank=rank, num_ranks=num_ranks, _has_warned=False, clone=lambda: job)
    return job


def process_of(rank: int) -> dict[str, Any]:
    return {**this_process(), "host": f"host {rank // RANKS_OF_A_HOST}"}


def loads(num_ranks: int, num_driven: int = 16, seconds: int = 20) -> dict[str, Load]:
    """What one rank asks for in a second, by what the job does; for at most 20 s, after which silence is noticed."""
    clock = [1000.0]
    store = CountingStore()

    def stand(ranks: range, number: int = 1) -> None:
        for rank in ranks:
            job_of(store, rank, num_ranks).write(_process_key(rank), process_of(rank))
            beat = {**REPORT, **process_of(rank), "pending": None, "number": number}
            job_of(store, rank, num_ranks).write(f"polyphase/watch/0/beat/{rank}", beat)

    def measured(waits: bool) -> Load:
        store.count = Load()
        for number in range(seconds):
            clock[0] += 1.0
            for rank in driven:
                rank.second(number, waits=waits)
        parts = vars(store.count)
        return Load(**{name: number / seconds / len(driven) for name, number in parts.items()})

    with mock.patch.object(time, "monotonic", side_effect=lambda: clock[0]):
        stand(range(num_ranks // 2))
        driven = [
            Driven(store, rank, num_ranks, lambda: clock[0])
            for rank in range(0, num_ranks, max(1, num_ranks // num_driven))
        ]
        for rank in driven:
            rank.due = clock[0] + 1.0
            rank.watchdog._before = clock[0]
        found = {"half of the ranks are connected": measured(waits=True)}
        stand(range(num_ranks))
        job_of(store, 0, num_ranks).write(ALL_CONNECTED, {})
        found["all are, and look for each other"] = measured(waits=False)
        for rank in driven:
            assert rank.watchdog.peers is not None
            rank.watchdog.peers.look_for_all()
        found["a step takes under a second"] = measured(waits=False)
        stand(range(num_ranks), number=2)
        found["a step takes longer"] = measured(waits=True)
    return found
