"""What the tests' own processes leave behind, and how they are started."""

import os
import time
import traceback

import psutil
import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from .distributed import run_ranks


def fail(rank: int) -> None:
    raise ValueError(f"of rank {rank}")


def test_the_failure_of_a_rank_keeps_no_server():
    """A later fork would free it, and abort."""
    with pytest.raises(ProcessRaisedException, match="ValueError: of rank") as raised:
        run_ranks(fail, 2, start_method="fork")
    values = [value for frame, _ in traceback.walk_tb(raised.tb) for value in frame.f_locals.values()]
    assert not [value for value in values if isinstance(value, dist.Store)]


def meet(rank: int) -> None:
    dist.barrier()


def test_no_rank_connects_before_all_have_been_forked():
    """The store's thread looks up who connects; a rank that is forked meanwhile can look up nothing, and hangs."""
    num_connections: list[int] = []

    def look() -> None:
        if is_looking:
            time.sleep(0.3)  # a rank that does not wait has connected by then
            connections = psutil.Process().net_connections("tcp")
            num_connections.append(sum(each.status == psutil.CONN_ESTABLISHED for each in connections))

    is_looking = True
    os.register_at_fork(before=look)
    try:
        run_ranks(meet, 3, start_method="fork")
    finally:
        is_looking = False
    assert num_connections == num_connections[:1] * 3
