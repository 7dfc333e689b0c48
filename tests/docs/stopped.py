"""A run of two ranks that is stopped in mid-epoch: ``python stopped.py STRATEGY STOP FOLDER KIND``.

`data_ranks.py` starts it, or calls `train` in a fork, which spares the imports.

Each rank adds a line for each batch that it is trained on to a file in `FOLDER`. With ``STOP`` "none" it goes on with
what a snapshot there has, if there is one.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine

SIZE, BATCH, STOP_AFTER, EPOCHS = 96, 3, 5, 4


class Shards(IterableDataset[int]):
    """A stream of eight shards, read one after the other."""

    num_shards, shards_in_order = 8, True

    def __init__(self, numbers: range = range(SIZE)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> "Shards":
        size = len(self.numbers) // num_shards
        return Shards(self.numbers[index * size : (index + 1) * size])


NUMBERS: Any = torch.arange(SIZE)
KINDS: dict[str, Callable[[], Any]] = {
    "`shuffle=True`": lambda: DataLoader(NUMBERS, BATCH, shuffle=True),
    "`shuffle=True`, 2 workers": lambda: DataLoader(NUMBERS, BATCH, shuffle=True, num_workers=2),
    "`StatefulDataLoader`, `shuffle=True`, 1 worker": lambda: StatefulDataLoader(
        NUMBERS, BATCH, shuffle=True, num_workers=1
    ),
    "`IterableDataset` with shards": lambda: DataLoader(Shards(), BATCH),
}


class Notes(LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with (self.folder / f"rank{self.global_rank}").open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch.tolist()]) + "\n")
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stops(Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        # SIGKILL on one rank, whose peers the engine ends; SIGTERM on rank 0, which tells the others.
        if trainer.global_step == STOP_AFTER and trainer.global_rank == (self.number == signal.SIGKILL):
            os.kill(os.getpid(), self.number)
        if trainer.global_step >= STOP_AFTER:
            time.sleep(0.2)  # the ranks agree on the step after which they stop; this epoch has some left by then


def train(strategy: str, stop: str, folder: Path, kind: str) -> None:
    """Begins the run, or goes on with it."""
    seed_everything(7, verbose=False)
    signals = {"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}
    # What goes on is not stopped again: it needs no more snapshots.
    every = 1000 if stop == "none" else 2
    callbacks: list[Callback] = [Snapshot(folder / "snapshots", every_n_steps=every, every_minutes=None)]
    callbacks += [Stops(signals[stop])] if stop in signals else []
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    flags: dict[str, Any] = dict.fromkeys(quiet, False)
    if stop == "max_steps":
        flags["max_steps"] = STOP_AFTER
    trainer = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        resume="auto",
        default_root_dir=folder,
        **flags,
    )
    trainer.fit(Notes(folder), KINDS[kind]())


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
