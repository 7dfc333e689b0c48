"""A rank that fails says so at once, whatever its device has still to do."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyphase.engine import Engine
from tests.engine.parity import QUIET
from tests.pairs import nightly

from . import in_a_child
from .test_runs_integration import Fits, rows

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


class FailsAlone(Fits):
    """Rank 0 begins a collective that rank 1, which is busy, does not join, and raises."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            if self.global_rank == 1:
                time.sleep(100)
            self.sums = dist.all_reduce(torch.ones(1, device=self.device), async_op=True)
            raise ValueError("this rank has had enough")
        return super().training_step(batch, batch_idx)


def _fails(flag: str) -> None:
    engine = Engine(strategy=flag, accelerator="sim", devices=2, max_steps=6, **QUIET)
    try:
        engine.fit(FailsAlone(), rows())
    except Exception as error:
        print("ended", type(error).__name__)


@pytest.mark.parametrize("flag", ["ddp_fork:timeout_s=60", *nightly("fsdp_fork:timeout_s=60")])
def test_a_collective_that_nobody_joins_does_not_keep_a_rank_from_saying_that_it_failed(flag, capfd):
    in_a_child(_fails, flag)
    said = capfd.readouterr().err
    assert "[rank 0] failed and ends the run" in said
    assert "ValueError: this rank has had enough" in said
