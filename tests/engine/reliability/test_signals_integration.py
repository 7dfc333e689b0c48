"""SIGTERM to one rank of a real run stops all of them at the same step, soon, and without being taken for a failure."""

import re
import sys

import pytest

from tests.distributed import run_command
from tests.pairs import nightly

SCRIPT = """
import os, signal, sys, time
import torch
from lightning.pytorch import Callback, LightningModule
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from polyphase.callbacks import Snapshot
from polyphase.engine import Engine

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.automatic_optimization = sys.argv[3] != "manual"
    def training_step(self, batch, batch_idx):
        time.sleep(0.002)
        loss = self.layer(batch[0]).sum()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

class Terminate(Callback):
    def on_train_start(self, trainer, module):
        Path(f"start{trainer.global_rank}").write_text(f"{trainer.global_step}")
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 50 and sys.argv[2] in (str(trainer.global_rank), f"parent of {trainer.global_rank}"):
            os.kill(os.getpid() if sys.argv[2].isdigit() else os.getppid(), signal.SIGTERM)
            print(f"sent at {time.time()}", flush=True)
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        # Rank 0 has left by then, with the store, unless it waits.
        if sys.argv[3] == "late" and trainer.global_rank == 1 and batch_idx >= 50:
            time.sleep(1.0)
        Path(f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {time.time()}")

if __name__ == "__main__":
    saves = sys.argv[3] == "saves"
    engine = Engine(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, enable_model_summary=False,
        callbacks=[Terminate(), *([Snapshot(every_minutes=None, every_n_steps=10**6)] if saves else [])],
        resume="auto" if saves else None, max_steps=int(sys.argv[4]),
        accumulate_grad_batches=3 if sys.argv[3] == "accumulate" else 1,
    )
    engine.fit(Module(), DataLoader(TensorDataset(torch.randn(400_000, 4)), batch_size=4))
"""


@pytest.mark.parametrize(
    ("strategy", "rank", "mode"),
    [
        *nightly(("ddp", 1, "plain"), ("ddp_fork", 1, "late")),  # fsdp has the first, ddp the second
        ("ddp", 0, "plain"),
        ("ddp_spawn", 1, "accumulate"),
        ("ddp_fork", 1, "saves"),
        ("ddp", 1, "late"),
        ("ddp_fork", "parent of 1", "saves"),
        *nightly(("ddp_spawn", "parent of 1", "plain"), ("ddp_spawn", "parent of 1", "saves")),
        ("fsdp", 1, "plain"),
        ("ddp", 1, "manual"),
    ],
)
def test_both_ranks_stop_at_one_step(strategy, rank, mode, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    # A warm worker that is spawned is no child of the process that has it spawned.
    options = {"timeout_s": 90, "cwd": tmp_path, "cold": strategy == "ddp_spawn" and not isinstance(rank, int)}
    finished = run_command([sys.executable, script, strategy, str(rank), mode, "-1"], **options)
    assert finished.returncode == 143, finished.output
    steps, times = zip(*[(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)], strict=True)
    assert steps[0] == steps[1], finished.output
    assert "failed" not in finished.output, finished.output
    (sent,) = re.findall(r"sent at ([\d.]+)", finished.output)
    # What the engine promises is 5 seconds; one is what it takes.
    assert max(float(ended) for ended in times) - float(sent) < 5
    if mode == "saves":
        assert [path.name for path in (tmp_path / "snapshots").glob("step=*")] == [f"step={steps[0]}"]
        arguments = [strategy, str(rank), mode, str(int(steps[0]) + 5)]
        resumed = run_command([sys.executable, script, *arguments], **options)
        assert resumed.returncode == 0, resumed.output
        for each in range(2):
            assert (tmp_path / f"start{each}").read_text() == steps[0]
            assert (tmp_path / f"rank{each}").read_text().split()[0] == arguments[-1]
