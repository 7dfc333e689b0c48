"""`Doctor` on an accelerator: phases are the compute stream's, nothing is waited for, and reads are found by line."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from polyphase.callbacks import Doctor
from polyphase.doctor import judge, read_run
from polyphase.engine import Engine
from tests.engine.tiny import QUIET

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute

STEPS = 24
PAUSE_S = 0.02


class Module(LightningModule):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layer, self.reads = torch.nn.Linear(4, 4), reads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch["x"]).square().mean()
        if self.reads:
            self.seen = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slow(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(PAUSE_S)


class Counts(Callback):
    """The device's counts after each step."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.reads.append(install().counts()["reads"])


def _train(folder: Path, reads: bool, *callbacks: Callback, **flags: Any) -> list[int]:
    counts = Counts()
    engine = Engine(
        **QUIET | {"accelerator": "sim"} | flags, devices=1, max_epochs=1, log_every_n_steps=8, default_root_dir=folder,
        callbacks=[*callbacks, counts], check_first_steps=False,
    )  # fmt: skip
    mask = torch.tensor([1, 1, 1, 0])
    data = [{"x": torch.ones(4), "attention_mask": mask} for _ in range(2 * STEPS)]
    engine.fit(Module(reads), DataLoader(data, batch_size=2, pin_memory=True))
    return [after - before for before, after in zip([0, *counts.reads], counts.reads, strict=False)]


def test_phases_of_the_device_add_up_and_nothing_is_read(tmp_path: Path) -> None:
    reads = in_a_child(_train, tmp_path, False, Slow(), Doctor())
    without = in_a_child(_train, tmp_path, False)
    run = read_run(str(tmp_path))
    assert run.ranks[0].device == "sim"
    assert sum(interval.num_steps for interval in run.intervals[0]) == STEPS
    for interval in run.intervals[0]:
        assert sum(interval.seconds.values()) == pytest.approx(interval.wall_s, rel=0.01)
    assert sum(interval.seconds["callbacks"] for interval in run.intervals[0]) >= STEPS * PAUSE_S
    assert judge(run).findings[0].cause == "slow_callback"
    ends = {3, 8, 16, 24}
    more = {step for step, (a, b) in enumerate(zip(without, reads, strict=True), start=1) if a != b}
    assert more <= ends, (without, reads)
    assert {interval.padding for interval in run.intervals[0]} <= {None, 0.25}
    assert any(interval.padding == 0.25 for interval in run.intervals[0])


def test_a_read_in_the_step_is_found_by_its_line(tmp_path: Path) -> None:
    in_a_child(_train, tmp_path, True, Doctor())
    findings = {finding.cause: finding for finding in judge(read_run(str(tmp_path))).findings}
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "loss.item()" in text)
    assert f"item() at {__file__}:{line} in training_step" in findings["device_reads"].evidence


class Vocabulary(Module):
    """Logits of 256 x 4,096 numbers, which are its loss's alone, or none but in chunks."""

    def __init__(self, in_chunks: bool) -> None:
        super().__init__()
        self.layer, self.in_chunks = torch.nn.Linear(4, 4096, bias=False), in_chunks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        classes = torch.arange(256, device=self.device)
        if self.in_chunks:
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
            return torch.nn.functional.linear_cross_entropy(batch, self.layer.weight, classes, options=options)
        return torch.nn.functional.cross_entropy(self.layer(batch), classes)


def _train_vocabulary(folder: Path, in_chunks: bool) -> None:
    flags = {**QUIET, "accelerator": "sim", "devices": 1, "max_epochs": 1, "check_first_steps": False}
    engine = Engine(**flags, default_root_dir=folder, callbacks=[Doctor()], log_every_n_steps=8)
    engine.fit(Vocabulary(in_chunks), DataLoader(torch.ones(256 * STEPS, 4), batch_size=256))


def test_logits_of_a_large_vocabulary_are_found(tmp_path: Path) -> None:
    causes = []
    for in_chunks in (False, True):
        in_a_child(_train_vocabulary, tmp_path / str(in_chunks), in_chunks)
        found = judge(read_run(str(tmp_path / str(in_chunks)))).findings
        causes.append({finding.cause: finding.evidence for finding in found})
    assert "the loss has 4 MB of logits" in causes[0]["large_logits"]
    assert "large_logits" not in causes[1]
