"""Random numbers under pipelines: all stages draw alike, each batch anew, and a resumed run as the whole one would."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import MLP, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET

from .test_strategy_integration import data


class Draws(MLP):
    """Blocks that change nothing, and a loss that is zero if all stages have drawn the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        for linear in self.net:
            nn.init.eye_(linear.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy = batch[0] + torch.randn_like(batch[0]) * random.random() + np.random.rand()
        loss = (self.net(noisy) - noisy).square().mean()
        self.log("drawn", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return loss


class DrawsAfterDropout(Draws):
    """As `Draws`, behind a dropout of what only the first stage has."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.net
        del self.net
        self.embed, self.net = nn.Linear(64, 64), blocks  # in this order: on the first stage

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = nn.functional.dropout(self.embed(batch[0]))
        noise = torch.randn_like(x)
        loss = (self.net(0 * x + noise) - noise).square().mean()
        self.log("drawn", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return loss


@pytest.mark.parametrize("module", [Draws, DrawsAfterDropout])
def test_all_stages_draw_the_same_numbers_for_a_micro_batch(module):
    engine = Engine(strategy="pp_fork:microbatches=4", accelerator="cpu", devices=2, max_epochs=2, **QUIET)
    engine.fit(module(), data())
    assert engine.callback_metrics["drawn"] < 1e-5  # about 1 with other numbers; weights decay a little


class Noisy(MLP):
    """Its loss has noise, its blocks have dropout; it logs a number that it draws, and returns one in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout()) for _ in range(2)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("drawn", torch.rand(()))
        return nn.functional.cross_entropy(self.net(batch[0] + torch.randn_like(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.rand(()) + 0 * self.net(batch[0]).sum()


class NotesNumbers(Callback):
    """Notes the drawn numbers, on the one line of a file that each batch appends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, trainer: Any, number: Tensor) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            with self.path.open("a") as file:
                file.write(f"{number.mean().item()!r}\n")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._note(trainer, trainer.callback_metrics["drawn"])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Tensor, *args: Any) -> None:
        self._note(trainer, outputs)


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty"
)  # the resumed run saves there, too
def test_each_batch_draws_other_numbers_and_a_resumed_run_those_of_the_whole_one(tmp_path):
    """The samplers draw nothing here, so the common stream is the same in all epochs."""

    def run(name: str, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        module = Noisy()
        flags = {**QUIET, "enable_checkpointing": True, "strategy": "pp_fork:microbatches=4", "max_steps": 8}
        saves = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=4, save_top_k=-1)
        callbacks = [NotesNumbers(tmp_path / name), saves]
        engine = Engine(**flags, accelerator="cpu", devices=2, max_epochs=-1, callbacks=callbacks)
        batches = DataLoader(data().dataset, batch_size=8, generator=torch.Generator())
        torch.manual_seed(7)
        engine.fit(module, batches, batches, ckpt_path=ckpt_path)
        return module.state_dict()

    whole = run("whole")
    numbers = (tmp_path / "whole").read_text().splitlines()
    assert len(numbers) == 8 + 2 * 3  # eight steps, and two validations of three batches
    assert len(set(numbers)) == len(numbers)
    assert largest_difference(run("resumed", tmp_path / "saved" / "step=4.ckpt"), whole) == 0
    assert (tmp_path / "resumed").read_text().splitlines() == numbers[4 + 3 :]  # in mid-epoch, after a validation
