"""Each rank draws random numbers of its own, the same ones in each run."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, Dataset

from tests.pairs import nightly

from ..parity import suffixed
from ..tiny import Regression, engine


class Noisy(Dataset[tuple[torch.Tensor, float]]):
    """Augments, in a worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.full((4,), index / self.size), float(torch.rand(()))


class Draws(Regression):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples, noise = batch
        self.drawn.append([float(torch.rand(())), random.random(), float(np.random.rand()), *noise.tolist()])
        return super().training_step(samples, batch_idx)

    def on_train_end(self) -> None:
        (self.folder / f"{self.trainer.global_rank}.json").write_text(json.dumps(self.drawn))


def draws(folder: Path, flag: str, devices: int, monkeypatch: Any) -> list[list[list[float]]]:
    folder.mkdir()
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which seed_everything would leave there
    seed_everything(5, verbose=False)
    loader = DataLoader(Noisy(8 * devices), batch_size=2, num_workers=1)
    engine(strategy=suffixed(flag, "fork"), devices=devices).fit(Draws(folder), loader)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]


@pytest.mark.parametrize("num_ranks", [2, *nightly(3)])
@pytest.mark.parametrize("flag", ["ddp", "fsdp"])
def test_ranks_draw_their_own_and_again_the_same(flag, num_ranks, tmp_path, monkeypatch):
    first = draws(tmp_path / "first", flag, num_ranks, monkeypatch)
    assert draws(tmp_path / "second", flag, num_ranks, monkeypatch) == first
    numbers = [number for rank in first for step in rank for number in step]
    assert len(set(numbers)) == len(numbers)
