"""Each callback of the package: a run with it has the same weights, and resumes as if not stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import polyphase.callbacks
from polyphase.callbacks import (
    CommunicationMonitor,
    ConsoleLogger,
    Doctor,
    MemoryMonitor,
    OptimizerMonitor,
    ProgressBar,
    ReplicaGuard,
    RunSummary,
    Snapshot,
    ThroughputMonitor,
    TraceProfiler,
)
from tests.engine.tiny import Regression, Saves, engine, rows

from .runs import MemoryLogger

SAVED, STEPS = 3, 7
"""In the middle of epochs of four steps."""

MAKE: dict[str, Callable[[Path], Callback]] = {
    "CommunicationMonitor": lambda folder: CommunicationMonitor(every_n_steps=1),
    "ConsoleLogger": lambda folder: ConsoleLogger(every_n_steps=1),
    "Doctor": lambda folder: Doctor(every_n_steps=1),
    "MemoryMonitor": lambda folder: MemoryMonitor(every_n_steps=1),
    "OptimizerMonitor": lambda folder: OptimizerMonitor(every_n_steps=1),
    "ProgressBar": lambda folder: ProgressBar(refresh_rate=1),
    "ReplicaGuard": lambda folder: ReplicaGuard(),
    "RunSummary": lambda folder: RunSummary(),
    "Snapshot": lambda folder: Snapshot(folder / "snapshots", every_n_steps=2, every_minutes=None, keep_last=9),
    "ThroughputMonitor": lambda folder: ThroughputMonitor(every_n_steps=1),
    "TraceProfiler": lambda folder: TraceProfiler(wait=1, warmup=1, active=1, on_signal=False),
}
BARS = ("ConsoleLogger", "ProgressBar")


class Restored(Callback):
    """Keeps the state that another callback has once its checkpoint is read, and before training changes it."""

    def __init__(self, of: Callback) -> None:
        self.of = of
        self.state: dict[str, Any] | None = None

    def on_fit_start(self, trainer, pl_module) -> None:
        self.state = self.of.state_dict()


def train(folder: Path, *callbacks: Callback, max_steps: int = STEPS, **flags: Any) -> tuple[dict[str, Any], Any]:
    """The weights after a run, and what it has logged."""
    ckpt_path, logger, module = flags.pop("ckpt_path", None), MemoryLogger(), Regression()
    fixed = {"max_epochs": -1, "max_steps": max_steps, "default_root_dir": folder, "logger": logger}
    fixed["gradient_clip_val"] = 1e3  # clips nothing, and has the norm computed
    engine(**fixed, **flags, callbacks=[*callbacks]).fit(module, rows(shuffle=True), ckpt_path=ckpt_path)
    return module.state_dict(), logger.rows


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_each_callback_is_held_to_it():
    public = {name for name in polyphase.callbacks.__all__ if isinstance(getattr(polyphase.callbacks, name), type)}
    assert {name for name in public if issubclass(getattr(polyphase.callbacks, name), Callback)} == set(MAKE)


@pytest.mark.parametrize("name", MAKE)
def test_it_trains_saves_and_resumes(name, tmp_path):
    flags = {"enable_progress_bar": name in BARS}
    torch.manual_seed(5)
    alone, _ = train(tmp_path / "alone")
    torch.manual_seed(5)
    whole, logged = train(tmp_path / "whole", MAKE[name](tmp_path / "whole"), **flags)
    assert same(whole, alone), "it changes the weights"

    path = tmp_path / "saved.ckpt"
    torch.manual_seed(5)
    saving = MAKE[name](tmp_path / "whole")
    train(tmp_path / "first", saving, Saves(path, SAVED), max_steps=SAVED, **flags)
    torch.manual_seed(6)
    callback = MAKE[name](tmp_path / "resumed")
    restored = Restored(callback)
    resumed, logged_since = train(tmp_path / "resumed", callback, restored, ckpt_path=path, **flags)
    assert same(resumed, whole), "it does not go on as if never stopped"
    saved = torch.load(path, weights_only=False)["callbacks"].get(callback.state_key, {})
    assert restored.state == saved, "its state does not come back"
    own = {key for _, row in logged for key in row if "/" in key}
    assert {key for _, row in logged_since for key in row if "/" in key} == own
    assert not [step for step, _ in logged_since if step is not None and step < SAVED], "it logs anew what was logged"


@pytest.mark.timeout(180)
def test_all_of_them_together_on_two_ranks(tmp_path):
    def run(folder: Path, **flags: Any) -> dict[str, Any]:
        torch.manual_seed(5)
        made = [make(folder) for name, make in MAKE.items() if name not in BARS]
        saving = Saves(tmp_path / "both.ckpt", SAVED)
        weights, _ = train(folder, *made, saving, strategy="ddp_fork", devices=2, **flags)
        return weights

    whole = run(tmp_path / "whole")
    torch.manual_seed(5)
    alone, _ = train(tmp_path / "alone", strategy="ddp_fork", devices=2)
    assert same(whole, alone)
    assert same(run(tmp_path / "resumed", ckpt_path=tmp_path / "both.ckpt"), whole)
