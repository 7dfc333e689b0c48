"""Two ranks that are stopped, or one of which fails: the snapshot is that of all, and the same command goes on."""

import functools
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from polyphase.engine.checkpoint import find, load_checkpoint

from ..distributed import Finished, run_command
from ..pairs import nightly

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader
from polyphase.callbacks import Snapshot
from polyphase.engine import Engine

strategy, when, victim, action = sys.argv[1:]

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        self.act("train", self.global_step == 12)
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
    def validation_step(self, batch, batch_idx):
        time.sleep(0.01)
        self.act("validate", self.global_step == 10 and batch_idx == 3)
        self.log("val", self.net(batch).mean(), sync_dist=True)
    def act(self, where, is_time):
        if where == when and is_time and self.trainer.global_rank == int(victim) and not Path("acted").exists():
            Path("acted").write_text("")
            if action == "raise":
                raise ValueError("on purpose")
            os.kill(os.getpid(), getattr(signal, action))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    seed_everything(3)
    rows = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1))
    callbacks = [Snapshot("snapshots", every_n_steps=5, every_minutes=None)]
    if action == "raise":
        callbacks.append(OnExceptionCheckpoint("on_exception"))
    engine = Engine(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=20, val_check_interval=10, resume="auto",
        limit_val_batches=120, enable_progress_bar=False, logger=False, enable_checkpointing=True,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=callbacks,
    )
    module = Module()
    engine.fit(module, DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows[:1200], batch_size=4))
    state = engine.strategy.lightning_module_state_dict()
    if engine.is_global_zero:
        torch.save(state, "weights.pt")
"""


def run(folder: Path, *arguments: str, timeout_s: float = 90) -> Finished:
    folder.mkdir(exist_ok=True)
    (folder / "run.py").write_text(SCRIPT)
    return run_command([sys.executable, folder / "run.py", *arguments], timeout_s=timeout_s, cwd=folder)


@functools.cache
def undisturbed(strategy: str) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody stopped."""
    with tempfile.TemporaryDirectory() as folder:
        finished = run(Path(folder), strategy, "never", "0", "SIGTERM")
        assert finished.returncode == 0, finished.output
        return torch.load(Path(folder) / "weights.pt", weights_only=True)


@pytest.mark.parametrize(
    ("strategy", "when", "victim"),
    [
        # A page of the how-tos stops ddp in mid-training.
        *nightly(("ddp", "train", "1"), ("ddp", "validate", "0")),
        ("fsdp", "validate", "1"),
    ],
)
def test_sigterm_leaves_one_snapshot_of_all_and_the_command_goes_on(strategy, when, victim, tmp_path):
    expected = undisturbed(strategy)
    stopped = run(tmp_path, strategy, when, victim, "SIGTERM")
    assert stopped.returncode == 143, stopped.output
    newest, manifest = find(tmp_path / "snapshots")[0]
    assert manifest.step >= 10
    assert load_checkpoint(newest)["global_step"] == manifest.step
    again = run(tmp_path, strategy, when, victim, "SIGTERM")
    assert again.returncode == 0, again.output
    assert f"continues from {Path('snapshots') / f'step={manifest.step}'}" in again.output.replace(f"{tmp_path}/", "")
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_failed_rank_ends_all_in_time_and_the_last_snapshot_opens(tmp_path):
    began = time.monotonic()
    failed = run(tmp_path, "fsdp", "train", "1", "raise")
    assert time.monotonic() - began < 30  # 10 s from the failure; the rest is the start of the processes
    assert failed.returncode not in (0, -9), failed.output
    assert "ValueError: on purpose" in failed.output
    assert "[rank 1] failed and ends the run" in failed.output
    newest, manifest = find(tmp_path / "snapshots")[0]
    assert manifest.step == 10
    assert load_checkpoint(newest)["global_step"] == 10
    again = run(tmp_path, "fsdp", "train", "1", "raise")
    assert again.returncode == 0, again.output
