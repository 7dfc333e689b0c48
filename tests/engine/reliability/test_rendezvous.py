"""The ranks of one start find each other among what earlier starts have left, and take no other form for a report."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from polyphase.engine.distributed.job_store import JobStore
from polyphase.engine.reliability.flight_recorder import describe_differences, mismatches
from polyphase.engine.reliability.heartbeat import describe
from polyphase.engine.reliability.rendezvous import RankRegistry, name_of_start, open_store
from polyphase.engine.reliability.stacks import lines
from polyphase.engine.reliability.watchdog import _lines, _stacks, behind
from tests.distributed import free_port

from .test_flight_recorder import call, rank

PATIENCE = timedelta(seconds=10)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def names(server: dist.TCPStore, ranks: list[int], world_size: int, patience: timedelta = PATIENCE) -> set[str]:
    def meet(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return name_of_start(store, rank, world_size, patience)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(meet, ranks))


def test_each_start_has_a_name_of_its_own_whatever_its_size(server):
    found = [names(server, list(range(size)), size) for size in (3, 3, 2, 4, 1)]
    assert all(len(each) == 1 for each in found)
    assert len(set().union(*found)) == 5


@pytest.mark.parametrize("died", [[0, 1], [1, 2], [2]])
def test_a_start_that_failed_half_way_is_forgotten(server, died):
    with pytest.raises((TimeoutError, dist.DistStoreError)):
        names(server, died, 3, timedelta(seconds=0.5))
    assert len(names(server, [2, 1, 0], 3)) == 1


def test_those_who_did_not_come_are_named(server):
    with pytest.raises(TimeoutError, match=r"ranks 1-2 of 3 did not connect within 0:00:00.2"):
        name_of_start(server, 0, 3, timedelta(seconds=0.2))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("is_local", "places"), [(True, {"127.0.0.1"}), (False, {"::", "0.0.0.0"})])
def test_on_several_machines_rank_0_listens_everywhere_and_needs_no_name_of_its_own(is_local, places):
    port = free_port()
    store = open_store(
        "127.0.0.1" if is_local else "no.such.host.invalid", port, PATIENCE, hosts=True, is_local=is_local
    )
    store.set("here", "yes")
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert {place.ip for place in listening if place.port == port} <= places
    assert port in {place.port for place in listening}


PLACE = {
    "step": 3,
    "batch": 3,
    "evaluated": 0,
    "phase": "train",
    "pending": "all_reduce",
    "line": "train.py:7 in training_step",
    "units": {"number": 5, "done": "gathered unit 2"},
    "is_debugged": False,
    "resume_from": None,
}
ANSWER = {
    **PLACE,
    "stack": '  File "train.py", line 7, in training_step\n',
    "collectives": rank(call(2, is_done=False)),
}
THREAD = {"name": "MainThread", "runs": True, "calls": [["train.py", 7, "training_step"]]}


def changed(value: Any) -> Iterator[Any]:
    """The same value, each of its parts in turn of another kind, or missing."""
    yield from (5, -1.5, True, "text", None, [], {}, [[1]])
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, part in parts:
        copied = value.copy()
        for each in changed(part):
            copied[place] = each
            yield copied
        del copied[place]
        yield copied


def test_a_report_of_another_form_is_none_and_stops_no_verdict(server):
    """Of a process that is no rank, in a job without a secret, say."""
    job = JobStore(server, 0, 2)
    peers = RankRegistry("run", job)
    registered = {"number": "1", "threads": [THREAD], "rank": 1, **peers.me, **PLACE}
    num_taken = 0
    for kind, valid in (("answer", ANSWER), ("stacks", registered)):
        for report in (valid, *changed(valid)):
            peers.publish(kind, report)
            taken = peers.read(kind, [0]).get(0)
            if taken is None:
                continue
            num_taken += 1
            if kind == "stacks":
                assert lines({0: taken}, all_threads=True)
                continue
            reports = {0: ANSWER, 1: taken}
            records = {rank: each.get("collectives") for rank, each in reports.items()}
            assert behind(reports)
            assert "is in phase" in describe(taken)
            describe_differences(records), mismatches(records)
            assert len(_stacks(reports, [1])) <= 3
            assert len(_lines(reports, [0])) <= 1
        assert peers.read(kind, [0]) == {}
    assert num_taken > 5
