"""Random generators come to workers that are spawned with their states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.tiny import QUIET, Positions, Seen


class Draws(Positions):
    """Has a generator of its own, in workers of the loader, too, that are spawned as the ranks are."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand((), generator=self.generator).item()


class Notes(Seen):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with (self.folder / str(self.global_rank)).open("a") as file:
            file.write(json.dumps([part.tolist() for part in batch]) + "\n")
        return self.weight * 1.0


def shuffled(batch_size: int, num_workers: int) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Draws(8), batch_size, shuffle=True, generator=generator, num_workers=num_workers)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.timeout(240)
def test_a_loader_may_have_generators_under_spawn(tmp_path):
    Engine(**QUIET, strategy="ddp_spawn", devices=2, max_epochs=1, check_first_steps=False).fit(
        Notes(tmp_path), shuffled(2, num_workers=1)
    )  # which would do the first steps again, and write the samples of two
    ranks = [[json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()] for rank in range(2)]
    together = [sorted(one[0] + other[0]) for one, other in zip(*ranks, strict=True)]
    assert together == [sorted(ids.tolist()) for ids, _ in shuffled(4, num_workers=0)]
    draws = torch.rand(4, generator=torch.Generator().manual_seed(3)).tolist()
    assert [[draw for _, part in rank for draw in part] for rank in ranks] == [draws, draws]
