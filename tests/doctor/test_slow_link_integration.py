"""`Doctor` on three hosts, of which one has a slow cable: it names that host, and so does `polyphase doctor host`."""

import sys
import time

import pytest

from polyphase.doctor import judge, read_run
from tests.chaos.switched import Switched

pytestmark = [pytest.mark.timeout(150), pytest.mark.nightly]
RATES = ["1gbit", "1gbit", "40mbit"]
JOB = """
import sys
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from polyphase.callbacks import Doctor
from polyphase.engine import Engine

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 50_000)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    Engine(
        strategy="ddp", accelerator="cpu", devices=1, num_nodes=3, max_steps=16, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, check_first_steps=False,
        callbacks=[Doctor(every_n_steps=6)], default_root_dir=sys.argv[1],
    ).fit(Module(), DataLoader(torch.ones(600, 8), batch_size=4))
"""


def run_on_all(tmp_path, *words):
    """Runs a command under a torchrun on each of the hosts; returns what they printed."""
    logs = [tmp_path / f"log{host}.txt" for host in range(len(RATES))]
    with Switched(RATES) as hosts:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(RATES)}", "--nproc-per-node=1"]
        launch += [f"--master-addr={hosts.addresses[0]}", "--master-port=29500"]
        children = []
        for host, log in enumerate(logs):
            there = [f"--node-rank={host}", f"--local-addr={hosts.addresses[host]}"]
            children.append(hosts.start(host, [*launch, *there, *map(str, words)], log))
        deadline = time.monotonic() + 120
        while any(child.is_running() and child.status() != "zombie" for child in children):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.2)
    return [log.read_text() for log in logs]


def test_the_host_with_the_slow_cable_is_named_after_a_run(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    printed = run_on_all(tmp_path, tmp_path / "job.py", tmp_path)
    run = read_run(str(tmp_path))
    assert sorted(run.ranks) == [0, 1, 2], printed
    findings = {finding.cause: finding for finding in judge(run).findings}
    assert "slow_link" in findings, (findings, printed)
    assert (findings["slow_link"].ranks, findings["slow_link"].host) == ((2,), "node2")
    assert findings["slow_link"].numbers["mb_per_s"] < 6, "40 Mbit/s are 5 MB/s"


def test_the_host_with_the_slow_cable_is_named_before_a_run(tmp_path):
    printed = run_on_all(tmp_path, "-m", "polyphase.engine", "doctor", "host", tmp_path)
    (links,) = [line for line in printed[0].splitlines() if "MB/s in an all-reduce" in line]
    assert links.startswith("warn links"), printed
    assert "look at the network interface and cable of rank 2 (node2)" in printed[0]
    for name in ("node0: disk", "node2: disk", "meeting", "clocks"):
        assert name in printed[0]
