"""What the doctor sends, reads and counts under each strategy, whatever else the machine does meanwhile."""

import json

import pytest
import torch
from torch.utils.data import DataLoader

from polyphase.callbacks import Doctor
from polyphase.engine import Engine
from tests.engine.loop.costs import Costs
from tests.engine.tiny import QUIET
from tests.pairs import nightly

from .doctor_runs import Blocks, Rows, run

LOCKSTEP = ["ddp_fork", "zero1_fork", "fsdp_fork", "local_sgd_fork:sync_every=2"]
NUM_STEPS = 9


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [*((each, 2) for each in LOCKSTEP), ("pp_fork", 2), *nightly(("tp_fork", 2), ("hsdp_fork:replicate=2", 4))],
)
def test_no_collective_and_no_read_between_two_intervals(tmp_path, strategy, devices):
    """Beside the strategy's own: the same run without a doctor has as many."""
    counts = []
    for callbacks in ([], [Doctor()]):
        folder = tmp_path / str(len(callbacks))
        folder.mkdir()
        trainer = Engine(
            **QUIET, strategy=strategy, devices=devices, max_steps=NUM_STEPS, log_every_n_steps=6,
            check_first_steps=False, callbacks=[Costs(folder), *callbacks], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Blocks(), DataLoader(Rows(), batch_size=4))
        counts.append([json.loads((folder / f"costs-{rank}.json").read_text()) for rank in range(devices)])
    ends = {5, NUM_STEPS - 1}
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
    monkeypatch.setattr("polyphase.doctor.watches._LONG_COMMUNICATION", 0.0)
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
            # Less than one on top, of those that a run makes once (which parameters have hooks, what steers the loop).
            assert 7 <= call["calls"] < 8
            assert call["sent_mb"] == pytest.approx(7 / 4 * weights_mb / 2, rel=1e-3)
