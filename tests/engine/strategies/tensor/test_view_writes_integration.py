"""Writes of a step into a part of a split activation are those of one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.model import Model
from tests.zoo.plain import rows
from tests.zoo.run import run
from tests.zoo.unusual import WIDTH, Blocks


class Writes(nn.Module):
    """An MLP whose hidden units, which are split over the ranks, are written to."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x)) * 1
        self.write(hidden)
        return x + self.down(hidden)


def by_index(x: Tensor) -> None:
    x[:, 0] = 0.5


def by_index_of_others(x: Tensor) -> None:
    x[:, :2] = x[:, 2:4]


def by_halves(x: Tensor) -> None:
    torch.narrow(x, 1, 0, 16).mul_(0.5)


def in_one_dim(x: Tensor) -> None:
    x.view(-1)[3] = 0.5


WRITES: list[Callable[[Tensor], object]] = [
    by_index,
    by_index_of_others,
    by_halves,
    in_one_dim,
    lambda x: x.select(1, 0).fill_(0.5),
    lambda x: x.t()[0].add_(0.5),
    lambda x: x[:, :3].mul_(0.5),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_a_part_is_that_of_one_process(write):
    def make() -> Blocks:
        module = Blocks()
        module.blocks = nn.ModuleList(Writes(write) for _ in range(2))
        return module

    assert run(Model(make, rows()), "tp").kind == "equal"
