"""Two ranks with micro-batches of b train on what the stock Trainer trains on in one process with batches of 2b."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from .tiny import QUIET, Positions, Seen, engine

SIZE = 14


class Writes(Seen):
    """Writes down its batches, and the state of the generator after them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        numbers = torch.get_rng_state().tolist()
        (self.folder / f"{self.trainer.global_rank}.json").write_text(json.dumps([self.epochs, numbers]))


def shuffled(batch_size: int) -> DataLoader[Any]:
    return DataLoader(Positions(SIZE), batch_size, shuffle=True)


@pytest.mark.usefixtures("warm_workers")
def test_two_ranks_have_stocks_order_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # taken back after the test
    found = []
    for name, make_trainer, batch_size in (
        ("stock", lambda: Trainer(**{**QUIET, "devices": 1, "max_epochs": 3}), 4),
        ("ranks", lambda: engine(strategy="ddp_spawn", devices=2, max_epochs=3), 2),
    ):
        (tmp_path / name).mkdir()
        seed_everything(11, verbose=False)
        torch.rand(2)  # as a module's weights are drawn
        make_trainer().fit(Writes(tmp_path / name), shuffled(batch_size))
        found.append([json.loads(path.read_text()) for path in sorted((tmp_path / name).iterdir())])
    ((expected, numbers),), ranks = found
    together = [
        [sorted(i for part in parts for i in part) for parts in zip(*epochs, strict=True)]
        for epochs in zip(*(epochs for epochs, _ in ranks), strict=True)
    ]
    assert together == [[sorted(batch) for batch in epoch] for epoch in expected]
    assert ranks[0][1] == numbers
    assert ranks[1][1] != numbers, "for dropout and the like each rank has numbers of its own"
