"""Faults that are put into one rank, or into all: the doctor names the cause and the rank, under each strategy."""

import json
import os
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Doctor
from polyphase.engine import Engine
from polyphase.engine.doctor import judge, read_run
from polyphase.engine.phases import PHASES
from tests.engine.loop.costs import Costs
from tests.engine.tiny import QUIET

FAULT_S = 0.06 * min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
"""Long beside a step, and beside what the other processes of a busy machine take from it: so much longer, the more of
them there are for each CPU."""
STEPS = 16


class Rows(Dataset):
    """Rows of 64 numbers; each odd one, of rank 1, may be slow to read."""

    def __init__(self, slow_s=0.0):
        self.slow_s = slow_s

    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, index):
        if index % 2:
            time.sleep(self.slow_s)
        return torch.full((64,), index / 100)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Blocks(LightningModule):
    """Blocks, which each strategy can cut."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(MLP() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowBlock(torch.nn.Module):
    """Sleeps in forward, where it is computed by rank `slow_rank`."""

    def __init__(self, slow_rank):
        super().__init__()
        self.slow_rank = slow_rank

    def forward(self, x):
        if torch.distributed.get_rank() == self.slow_rank:
            time.sleep(FAULT_S)
        return x.tanh()


class SlowBlocks(Blocks):
    def __init__(self, slow_rank):
        super().__init__()
        self.blocks[-1].act = SlowBlock(slow_rank)


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


class Edges(Callback):
    """Notes when training began and ended on each rank, for a callback in this place."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def on_train_start(self, *args):
        self.began = time.perf_counter()

    def on_train_end(self, trainer, *args):
        path = self.folder / f"{self.name}-{trainer.global_rank}.json"
        path.write_text(json.dumps([self.began, time.perf_counter()]))


def run(folder, strategy, *callbacks, module=None, slow_s=0.0, devices=2, **flags):
    flags = {**QUIET, "max_steps": STEPS, "check_first_steps": False, "log_every_n_steps": 6, **flags}
    callbacks = [Edges(folder, "before"), *callbacks, Doctor(), Edges(folder, "after")]
    trainer = Engine(strategy=strategy, devices=devices, callbacks=callbacks, default_root_dir=folder, **flags)
    trainer.fit(module or Blocks(), DataLoader(Rows(slow_s), batch_size=4))
    return read_run(str(folder))


def check_found(noted, cause, *ranks):
    """It is found where it is, and nothing at another rank; what all ranks have in common may be found as well."""
    findings = [(finding.cause, finding.ranks) for finding in judge(noted).findings]
    assert (cause, ranks) in findings, (findings, judge(noted).lines())
    assert {where for _, where in findings} <= {(), ranks}, findings


def check_sums(noted, folder, num_ranks=2):
    """The phases of each rank add up to the wall time of its training, within 1 %."""
    assert sorted(noted.intervals) == list(range(num_ranks))
    for rank, intervals in noted.intervals.items():
        before, after = (json.loads((folder / f"{name}-{rank}.json").read_text()) for name in ("before", "after"))
        measured_s = sum(sum(interval.seconds.values()) for interval in intervals)
        assert 0.99 * (before[1] - after[0]) <= measured_s <= 1.01 * (after[1] - before[0])
        assert sum(interval.num_steps for interval in intervals) == STEPS
        for interval in intervals:
            assert sum(interval.seconds.values()) == pytest.approx(interval.wall_s, rel=0.01)
            assert interval.seconds.keys() == PHASES.keys()
            assert min(interval.seconds.values()) >= 0.0


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


LOCKSTEP = ["ddp_fork", "zero1_fork", "fsdp_fork", "local_sgd_fork:sync_every=2", "tp_fork"]
SYNCHRONOUS = ["ddp_fork", "zero1_fork", "fsdp_fork", "local_sgd_fork:sync_every=2", "ps_fork"]


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_slow_rank(tmp_path, strategy):
    noted = run(tmp_path, strategy, module=SlowBlocks(1))
    check_sums(noted, tmp_path)
    check_found(noted, "slow_rank", 1)
    waited = [sum(interval.seconds["waiting"] for interval in noted.intervals[rank]) for rank in range(2)]
    assert waited[0] > 5 * waited[1]
    assert waited[0] > STEPS * FAULT_S / 2
    if strategy != "ps_fork":  # where ranks are not in step
        check_steps(noted)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
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
    noted = run(tmp_path, "pp_fork", module=SlowBlocks(1))
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


def test_slow_rank_of_four(tmp_path):
    noted = run(tmp_path, "hsdp_fork:replicate=2", module=SlowBlocks(2), devices=4)
    check_sums(noted, tmp_path, 4)
    check_found(noted, "slow_rank", 2)


class Computes(Blocks):
    """Computes long enough that what is sent is little beside it."""

    def training_step(self, batch, batch_idx):
        for _ in range(60):
            batch = batch + 1e-9 * (batch.T @ batch).sum(0)
            torch.linalg.matrix_exp(torch.full((96, 96), 1e-3))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("strategy", "devices"), [*((each, 2) for each in LOCKSTEP), ("pp_fork", 2), ("hsdp_fork:replicate=2", 4)]
)
def test_no_collective_and_no_read_between_two_intervals(tmp_path, strategy, devices):
    """Beside the strategy's own: the same run without a doctor has as many."""
    counts = []
    for callbacks in ([], [Doctor()]):
        folder = tmp_path / str(len(callbacks))
        folder.mkdir()
        trainer = Engine(
            **QUIET, strategy=strategy, devices=devices, max_steps=STEPS, check_first_steps=False, log_every_n_steps=6,
            callbacks=[Costs(folder), *callbacks], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Blocks(), DataLoader(Rows(), batch_size=4))
        counts.append([json.loads((folder / f"costs-{rank}.json").read_text()) for rank in range(devices)])
    ends = {5, 11, STEPS - 1}
    for without, with_doctor in zip(*counts, strict=True):
        for kind in ("reads", "collectives"):
            differences = [b - a for a, b in zip(without[kind], with_doctor[kind], strict=True)]
            assert {batch for batch, difference in enumerate(differences) if difference} <= ends, (kind, differences)
            if kind == "collectives":
                assert 1 <= differences[5] <= 2, "one gather of an object: its size, and the object"


class Grows(Blocks):
    """Has gradients that are worth looking at, which a message takes next to no time for."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(300_000))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-3 * self.more.sum()


def test_what_compression_costs_is_timed_in_one_step_of_an_interval(tmp_path, monkeypatch):
    monkeypatch.setattr("polyphase.callbacks._watches._LONG_COMMUNICATION", 0.0)
    noted = run(tmp_path, "ddp_fork", module=Grows(), compression="topk")
    for intervals in noted.intervals.values():
        assert intervals[-1].all_reduce_mb_per_s > 0.0
        costs = [each.compression for each in intervals if "wire_s" in each.compression]
        assert len(costs) >= 2
        for cost in costs:
            # 8 bytes for one value of a hundred, and half of them to either rank; all of it twice, by an all-reduce.
            assert 1.2 <= cost["plain_mb"] <= 1.5
            assert 0.01 < cost["sent_mb"] < 0.2
            assert min(cost["compress_s"], cost["wire_s"]) > 0.0


@pytest.mark.parametrize(
    ("strategy", "operation"), [("ddp_fork", "all_reduce"), ("zero1_fork", "all_reduce"), ("fsdp_fork", "all_gather")]
)
def test_collectives_of_a_step_are_counted_by_operation(tmp_path, strategy, operation):
    noted = run(tmp_path, strategy)
    weights_mb = sum(p.numel() * p.element_size() for p in Blocks().parameters()) / 1e6
    for intervals in noted.intervals.values():
        own = 0.5 if strategy == "fsdp_fork" else 1.0
        assert intervals[-1].model_mb["parameters"] == pytest.approx(own * weights_mb, rel=1e-3)
        assert intervals[-1].model_mb["gradients"] == pytest.approx(own * weights_mb, rel=1e-3)
        assert not any(each.collectives for each in intervals[:-1])
        call = intervals[-1].collectives[operation]
        if operation == "all_reduce":
            # One bucket holds all gradients; each of two ranks sends as many bytes in a ring.
            assert (call["calls"], call["sent_mb"]) == (1.0, pytest.approx(weights_mb, rel=1e-3))
        else:
            # A unit for each block, half of which is sent: for forward and, but for the last one, for backward.
            assert call["calls"] == 7
            assert call["sent_mb"] == pytest.approx(7 / 4 * weights_mb / 2, rel=1e-3)


@pytest.mark.parametrize(("threshold", "are_measured"), [(0.0, True), (1.0, False)])
def test_links_are_measured_where_communication_takes_long(tmp_path, monkeypatch, threshold, are_measured):
    monkeypatch.setattr("polyphase.callbacks._watches._LONG_COMMUNICATION", threshold)
    monkeypatch.setattr("polyphase.callbacks._watches._MIN_HOSTS", 1)
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
