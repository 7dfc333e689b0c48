"""A job whose ranks write what `CommunicationMonitor` counted and what their network interface did."""

import json
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from tests.engine.tiny import QUIET

FIRST, LAST = 2, 12


class Wide(LightningModule):
    """A million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Interface(Callback):
    """Reads the interface's counter at the same steps as the monitor its own."""

    def __init__(self, monitor: CommunicationMonitor, name: str, path: Path) -> None:
        self.monitor, self.name, self.path = monitor, name, path
        self.sent = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.barrier()
        if trainer.global_step == FIRST:
            self.sent = self.read()
        if trainer.global_step == LAST:
            seen = self.read() - self.sent
            counted = self.monitor.last["communication/sent_mb"] * 1e6 * (LAST - FIRST)
            (self.path / f"{trainer.global_rank}.json").write_text(json.dumps([counted, seen]))

    def read(self) -> int:
        """Of this process's own network namespace."""
        return psutil.net_io_counters(pernic=True)[self.name].bytes_sent


class From(CommunicationMonitor):
    """Counts from `FIRST` on."""

    def log_if_due(self, trainer: Any) -> None:
        if trainer.global_step in (FIRST, LAST):
            self.last = self.measure(trainer)


def main(compression: str, folder: Path, interface: str) -> None:
    monitor = From(every_n_steps=1000)
    callbacks = [monitor, Interface(monitor, interface, folder)]
    engine = Engine(
        **QUIET,
        strategy="ddp",
        devices=1,
        num_nodes=2,
        max_steps=LAST,
        compression=compression,
        callbacks=callbacks,
        hang_timeout_s=60,
    )
    engine.fit(Wide(), DataLoader(torch.randn(64, 1024), batch_size=2))  # type: ignore[arg-type]
