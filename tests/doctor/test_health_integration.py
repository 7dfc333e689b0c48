"""Replicas that drift apart under DDP, and ranks that are healthy under each strategy."""

import pytest
import torch
from lightning.pytorch import Callback

from polyphase.doctor import judge
from tests.doctor.doctor_runs import STEPS, run
from tests.doctor.test_health import HEALTH


class Drifts(Callback):
    """Changes one weight of rank 1, once."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 6:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] += 1e-3


def health(noted):
    return {finding.cause: finding for finding in judge(noted).findings if finding.cause in HEALTH}


def test_replicas_that_drift_apart(tmp_path):
    noted = run(tmp_path, "ddp_fork", Drifts(), log_every_n_steps=2)
    finding = health(noted)["replicas_differ"]
    assert finding.numbers["step"] == 8
    assert finding.ranks == (), "of two, nobody knows which one is right"


@pytest.mark.parametrize(
    "strategy", ["ddp_fork", "zero1_fork", "fsdp_fork", "tp_fork", "pp_fork", "local_sgd_fork:sync_every=2"]
)
def test_healthy_ranks_and_what_they_compute(tmp_path, strategy):
    """All strategies together compute what one process does."""
    noted = run(tmp_path, strategy, log_every_n_steps=2)
    assert health(noted) == {}
    # Under the others a rank has weights that no other one has, or has its own for a while.
    assert all((interval.checksum is not None) == (strategy == "ddp_fork") for interval in noted.intervals[0][1:])
    num_batches = sum(interval.num_batches for interval in noted.intervals[0])
    assert num_batches == STEPS
    total = sum(interval.flops for intervals in noted.intervals.values() for interval in intervals)
    samples = 4 * STEPS * (1 if strategy in ("tp_fork", "pp_fork") else 2)
    weights = 4 * 2 * 64 * 128
    # The first layer has no gradient of its input, but on a stage or a unit that asks for it.
    assert 6 * weights * samples - 2 * 64 * 128 * samples <= total <= 6 * weights * samples
