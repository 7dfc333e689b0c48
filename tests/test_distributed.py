"""What the tests' own processes leave behind."""

import traceback

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
