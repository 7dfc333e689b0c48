"""torch records gloo's collectives, and a failure report says in which of them the ranks differ."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader

from polyphase.engine.reliability.flight_recorder import describe_differences, recorded, traffic
from tests.distributed import run_ranks
from tests.engine.tiny import as_rank, engine


def test_torch_records_the_collectives_of_gloo():
    run_ranks(_record, 2, start_method="fork")


def _record(rank):
    group = dist.new_group([0, 1], group_desc="mine")
    dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        dist.distributed_c10d._get_default_store().set("called", "")
    else:
        dist.distributed_c10d._get_default_store().get("called")
    found = recorded()
    # gloo's thread records that a call is done after it has woken the one that waits for it.
    while not (mine := found["calls"][f"gloo {group.group_name}"][-1])["is_done"]:
        found = recorded()
    last = found["calls"]["gloo 0"][-1]
    if rank == 0:
        assert (last["operation"], last["input_sizes"], last["is_done"]) == ("all_reduce", [[5]], False)
    else:
        assert last["input_sizes"] != [[5]]
    assert (mine["group"], mine["input_dtypes"]) == ("mine", ["Float"])
    assert found["groups"][group.group_name] == [0, 1]
    everyones = [None, None]
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("rank0", json.dumps(found))
        everyones = {0: found, 1: json.loads(dist.distributed_c10d._get_default_store().get("rank1"))}
    else:
        dist.distributed_c10d._get_default_store().set("rank1", json.dumps(found))
        everyones = {0: json.loads(dist.distributed_c10d._get_default_store().get("rank0")), 1: found}
    (sentence,) = describe_differences(everyones)
    assert "rank 0 called all_reduce of Float [5]" in sentence
    assert "which rank 1 did not" in sentence
    if rank == 1:
        work = dist.all_reduce(torch.ones(5), async_op=True)
    work.wait()


def _record_again(rank):
    """The default group is destroyed and made anew, as by two runs of one process."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    for _ in range(9):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert recorded() is None, "the new group has called nothing"
    _record(rank)


def test_calls_of_an_earlier_group_of_the_same_name_are_left_out():
    run_ranks(_record_again, 2, start_method="fork")


class Troubled(LightningModule):
    """Its ranks call a collective with other types, and then rank 1 stands still."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:  # of as many bytes: gloo adds them up, to nonsense
            dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][self.global_rank]))
        elif batch_idx == 4 and self.global_rank == 1:
            time.sleep(100)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank):
    as_rank(rank)
    sys.stderr = Path(f"said{rank}").open("w")  # noqa: SIM115 - until the process ends
    engine(strategy="ddp", devices=2, hang_timeout_s=5).fit(Troubled(), DataLoader(torch.ones(64, 4)))


def test_a_hang_names_the_collective_that_a_rank_has_not_called_and_types_that_differ():
    with pytest.raises(ProcessExitedException):
        run_ranks(_fit, 2, start_method="fork", timeout_s=150)
    (path,) = Path("failures").iterdir()
    report = json.loads(path.read_text())
    assert (report["kind"], report["first_failing_rank"]) == ("hang", 1)
    differ, absent = report["collectives"]
    assert "has other types on rank 0 (all_reduce of Float [4]) than on rank 1 (all_reduce of Int [4])" in differ
    assert absent.startswith("rank 0 called ")
    assert "which rank 1 did not" in absent
    said = Path("said0").read_text() + Path("said1").read_text()
    assert f"Collectives: {differ}. Collectives: {absent}." in said
    assert all(report["ranks"][rank]["collectives"]["calls"] for rank in "01")


def _traffic_of_windows(rank):
    windows = []
    for number_of_calls in (1200, 1200, 3):
        began_ns = time.time_ns()
        for _ in range(number_of_calls):
            dist.all_reduce(torch.ones(1000))
        windows.append((began_ns, time.time_ns()))
    dist.all_reduce(torch.ones(10))  # in none of them
    num_windows, calls = traffic(windows)
    assert num_windows == 2, "the last 2,000 calls are recorded, which leaves out a part of the first window"
    assert {name: call.number for name, call in calls.items()} == {"all_reduce": 1203}
    assert calls["all_reduce"].sent_bytes == 1203 * 4000, "of two ranks each sends as much as it has"
    assert traffic(windows[:1]) == (0, {})
    assert traffic(windows[2:])[1]["all_reduce"].number == 3


def test_calls_and_bytes_are_those_of_windows_that_the_recorder_has_whole():
    run_ranks(_traffic_of_windows, 2, start_method="fork", timeout_s=60)
