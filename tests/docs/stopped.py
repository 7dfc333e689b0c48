"""A run of two ranks that is stopped in mid-epoch: ``python stopped.py STRATEGY STOP FOLDER``, for `data_ranks.py`.

Each rank adds a line for each batch that it is trained on to a file in `FOLDER`. With ``STOP`` "none" it goes on with
what a snapshot there has, if there is one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine

SIZE, BATCH, STOP_AFTER, EPOCHS = 240, 3, 5, 2


class Notes(LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with (self.folder / f"rank{self.global_rank}").open("a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch.tolist()]) + "\n")
        time.sleep(0.02)  # the ranks agree on the step after which they stop; there are some left by then
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


def main() -> None:
    strategy, stop, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    seed_everything(7, verbose=False)
    signals = {"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}
    callbacks: list[Callback] = [Snapshot(folder / "snapshots", every_n_steps=2, every_minutes=None)]
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
    trainer.fit(Notes(folder), DataLoader(torch.arange(SIZE), BATCH, shuffle=True))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
