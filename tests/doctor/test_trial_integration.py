"""`polyphase doctor fit --try` on a loader that is slow, and on a command that fails."""

import json
import sys
from pathlib import Path

from tests.distributed import run_command

MODULE = """
import time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(4)


class Slow(LightningDataModule):
    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=1, num_workers=self.num_workers, persistent_workers=self.num_workers > 0)


class Linear(LightningModule):
    def __init__(self, fails: bool = False):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(4, 1), fails

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ZeroDivisionError("this step fails")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def doctor(*words):
    Path("mine.py").write_text(MODULE)
    command = [sys.executable, "-m", "polyphase.engine", "doctor", "fit", "--steps", "30"]
    return run_command(
        [*command, "--model", "mine.Linear", *words, "--data", "mine.Slow", "--accelerator", "cpu", "--devices", "1"],
        timeout_s=280,
    )


def test_a_slow_loader_is_found_and_its_remedy_measured():
    finished = doctor("--try", "--json")
    assert finished.returncode == 0, finished.output
    found = json.loads(finished.output[finished.output.index("\n{\n") :])
    assert found["findings"][0]["cause"] == "slow_loader"
    trial = found["trials"][0]
    assert trial["remedy"].startswith("--data.num_workers=")
    assert trial["before_s"] > 0.05
    assert trial["measured"] == 1 - trial["after_s"] / trial["before_s"]
    assert 0.5 < trial["forecast"] <= 1
    assert {path.name for path in Path().iterdir()} <= {"mine.py", "__pycache__"}, "nothing is left behind"


def test_a_command_that_fails_says_why():
    finished = doctor("--model.fails=true")
    assert finished.returncode == 1
    assert "ZeroDivisionError: this step fails" in finished.output
