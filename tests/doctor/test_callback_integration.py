"""Faults that are put into one rank, or into all: the doctor names the cause and the rank, under each strategy."""

import time

import pytest
import torch
from lightning.pytorch import Callback

from polyphase.doctor import judge
from tests.pairs import nightly

from .doctor_runs import FAULT_S, STEPS, Blocks, SlowBlock, SlowBlocks, check_sums, run


class SlowHook(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1:
            time.sleep(FAULT_S)


class SlowSaves(Callback):
    """Saves after each second step, to a disk on which that takes long."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step % 2 == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        time.sleep(2 * FAULT_S)


def check_found(noted, cause, *ranks):
    """It is found where it is, and nothing at another rank; what all ranks have in common may be found as well."""
    findings = [(finding.cause, finding.ranks) for finding in judge(noted).findings]
    assert (cause, ranks) in findings, (findings, judge(noted).lines())
    assert {where for _, where in findings} <= {(), ranks}, findings


def check_steps(noted):
    """Of each interval two steps are noted, the same ones on all ranks, in which one computes and the other waits."""
    by_rank = [[each.steps for each in noted.intervals[rank] if not each.is_warmup] for rank in range(2)]
    assert [[step["step"] for step in steps] for steps in by_rank[0]] == [[s["step"] for s in o] for o in by_rank[1]]
    assert any(by_rank[0])
    for steps in zip(*by_rank, strict=True):
        for waits, is_slow in zip(*steps, strict=True):
            assert waits["wall_s"] == is_slow["wall_s"] > FAULT_S
            assert is_slow["compute"] > FAULT_S
    assert sum(steps[-1].get("waiting", 0.0) for steps in by_rank[0] if steps) > FAULT_S / 2


SYNCHRONOUS = ["ddp_fork", "zero1_fork", "fsdp_fork", "local_sgd_fork:sync_every=2", "ps_fork"]


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS[::2], *nightly(*SYNCHRONOUS[1::2])])
def test_slow_rank(tmp_path, strategy):
    noted = run(tmp_path, strategy, module=SlowBlocks(1))
    check_sums(noted, tmp_path)
    check_found(noted, "slow_rank", 1)
    waited = [sum(interval.seconds["waiting"] for interval in noted.intervals[rank]) for rank in range(2)]
    assert waited[0] > 5 * waited[1]
    assert waited[0] > STEPS * FAULT_S / 2
    if strategy != "ps_fork":  # where ranks are not in step
        check_steps(noted)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS[1::2], *nightly(*SYNCHRONOUS[::2])])
def test_slow_loader(tmp_path, strategy):
    noted = run(tmp_path, strategy, slow_s=FAULT_S / 4)
    check_sums(noted, tmp_path)
    check_found(noted, "slow_loader", 1)


def test_slow_callback(tmp_path):
    check_found(run(tmp_path, "ddp_fork", SlowHook()), "slow_callback", 1)


def test_slow_saves(tmp_path):
    noted = run(tmp_path, "ddp_fork", SlowSaves(tmp_path))
    check_sums(noted, tmp_path)
    assert judge(noted).findings[0].cause == "checkpoint_stall"


def test_slow_stage(tmp_path):
    noted = run(tmp_path, "pp_fork:microbatches=2", module=SlowBlocks(1))
    check_sums(noted, tmp_path)
    check_found(noted, "unequal_stages", 1)


class EqualStages(Blocks):
    """Each of two stages sleeps as long in forward."""

    def __init__(self):
        super().__init__()
        for block, rank in ((self.blocks[0], 0), (self.blocks[-1], 1)):
            block.act = SlowBlock(rank)


def test_the_bubble_of_a_pipeline(tmp_path):
    """Two stages that are alike take three times one micro-batch for two of them: a third of that they wait."""
    noted = run(tmp_path, "pp_fork:microbatches=2", module=EqualStages())
    check_sums(noted, tmp_path)
    check_found(noted, "few_micro_batches")
    for intervals in noted.intervals.values():
        bubble_s = sum(interval.seconds["bubble"] for interval in intervals[1:])
        num_steps = sum(interval.num_steps for interval in intervals[1:])
        assert bubble_s >= 0.8 * num_steps * FAULT_S
        others_s = sum(
            sum(interval.seconds[each] for each in ("communication", "waiting")) for interval in intervals[1:]
        )
        assert others_s < bubble_s / 2


def test_slow_rank_of_a_tensor_parallel_run(tmp_path):
    noted = run(tmp_path, "tp_fork", module=SlowBlocks(1))
    check_sums(noted, tmp_path)
    check_found(noted, "slow_rank", 1)


@pytest.mark.parametrize("strategy", ["ddp_fork", *nightly("hsdp_fork:replicate=2")])
def test_slow_rank_of_four(tmp_path, strategy):
    noted = run(tmp_path, strategy, module=SlowBlocks(2), devices=4)
    check_sums(noted, tmp_path, 4)
    check_found(noted, "slow_rank", 2)


class Computes(Blocks):
    """Computes long enough that what is sent is little beside it."""

    def training_step(self, batch, batch_idx):
        for _ in range(60):
            batch = batch + 1e-9 * (batch.T @ batch).sum(0)
            torch.linalg.matrix_exp(torch.full((96, 96), 1e-3))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("threshold", "are_measured"), [(0.0, True), (1.0, False)])
def test_links_are_measured_where_communication_takes_long(tmp_path, monkeypatch, threshold, are_measured):
    monkeypatch.setattr("polyphase.doctor.watches._LONG_COMMUNICATION", threshold)
    monkeypatch.setattr("polyphase.doctor.watches._MIN_HOSTS", 1)
    noted = run(tmp_path, "ddp_fork", devices=3)
    check_sums(noted, tmp_path, 3)
    for rank, intervals in noted.intervals.items():
        links = intervals[-1].links
        assert [source for source, rate in enumerate(links) if rate == 0.0] == ([rank] if are_measured else [])
        assert not any(each.links for each in intervals[:-1])


def test_a_healthy_run_has_no_finding_of_a_rank(tmp_path):
    noted = run(tmp_path, "ddp_fork", module=Computes(), max_steps=40, max_epochs=-1)
    # What else computes on this machine may well be in their way.
    findings = [each for each in judge(noted).findings if each.cause not in ("busy_neighbour", "varying_steps")]
    assert findings == []
