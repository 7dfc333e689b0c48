"""The runs of `doctor_beside.py`: a fault of `_doctor_kinds.py`, under the Engine with `Doctor` or stock Lightning.

The module, its data, its logger and its callback are those of `_doctor_runs.py` for each tool. Run as a script it is
one rank of a stock run, which is what TraceML's launcher starts.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _doctor_kinds import Trial
from _doctor_runs import BATCH, QUIET, Fault, Hooks, Module, MoreOnOne, Rows, SlowLogger
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.utils.data import DataLoader

from polyphase.callbacks import Doctor
from polyphase.engine import Engine

__all__ = ["fit_stock", "fit_with_doctor", "fit_with_profiler"]

_OF_THE_ENGINE = ("enable_run_summary", "check_first_steps")
"""Flags that the stock Trainer lacks."""


class LoggingModule(Module):
    """Computes in `forward`, which TraceML times, and logs its loss, which a stock run sends to its logger."""

    def forward(self, x: Tensor, batch_idx: int) -> Tensor:
        return self._loss(x, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch["x"], batch_idx)
        self.log("loss", loss)
        return loss


def fit_with_doctor(trial: Trial, folder: Path) -> None:
    """Trains under the Engine with `Doctor`, whose notes are in `folder`."""
    _fit(Engine, trial, folder, callbacks=[Doctor(every_n_steps=trial.interval)], strategy="ddp_fork", **QUIET)


def fit_with_profiler(trial: Trial, folder: Path) -> None:
    """Trains under the stock Trainer with `SimpleProfiler`, which writes a file for each rank."""
    profiler = SimpleProfiler(dirpath=folder, filename="profile", extended=True)
    fit_stock(trial, folder, strategy="ddp_fork", profiler=profiler)


def fit_stock(trial: Trial, folder: Path, **flags: Any) -> None:
    """Trains under the stock Trainer."""
    quiet = {name: value for name, value in QUIET.items() if name not in _OF_THE_ENGINE}
    _fit(Trainer, trial, folder, **quiet | flags)


def _fit(trainer_class: type[Trainer], trial: Trial, folder: Path, callbacks: Any = (), **flags: Any) -> None:
    torch.set_num_threads(1)
    fault = Fault(trial)
    if trial.kind == "slow_logger":
        flags["logger"] = SlowLogger(folder / "logs", fault)
    has_validation = trial.kind == "slow_validation"
    if has_validation:
        flags["val_check_interval"] = 2
    trainer = trainer_class(
        **flags,
        devices=trial.devices,
        max_steps=trial.steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        log_every_n_steps=trial.interval,
        callbacks=[Hooks(fault, folder), *callbacks],
        default_root_dir=folder,
    )
    collate = MoreOnOne(trial) if trial.kind == "more_samples" else None
    data = DataLoader(Rows(BATCH * trial.devices * trial.steps, fault), batch_size=BATCH, collate_fn=collate)
    validation = DataLoader(Rows(BATCH * trial.devices * 2, fault), batch_size=BATCH)
    trainer.fit(LoggingModule(fault), data, validation if has_validation else None)


if __name__ == "__main__":
    fit_stock(Trial(**json.loads(sys.argv[1])), Path(sys.argv[2]), strategy="ddp")
