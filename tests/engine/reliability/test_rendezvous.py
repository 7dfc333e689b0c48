"""The ranks of one start find each other among what earlier starts have left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from polyphase.engine.reliability.rendezvous import name_of_start, open_store
from tests.distributed import free_port

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
