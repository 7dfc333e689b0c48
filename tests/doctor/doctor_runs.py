"""Runs of a few blocks with the doctor, with a fault in one rank or in none."""

import json
import os
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Doctor
from polyphase.doctor import read_run
from polyphase.engine import Engine
from polyphase.engine.phases import PHASES
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
