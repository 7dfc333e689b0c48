"""Loaders of other classes than `DataLoader` that have a state, such as torchdata's nodes: resumed runs are exact."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchdata.nodes as nodes
from torch.utils.data import RandomSampler

from tests.pairs import alternating

from .runs import assert_goes_on

SIZE = 14


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


class Counts:
    """Says where it is, and nothing of its length."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.at % 5, 5):
            self.at = number + 1
            yield torch.tensor([number])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sized(Counts):
    def __len__(self) -> int:
        return 5


def of_nodes(generator: torch.Generator | None = None, num_threads: int = 0) -> Any:
    order: Any = nodes.SamplerWrapper(RandomSampler(range(SIZE), generator=generator))
    batches = nodes.Batcher(order, 3, drop_last=False)
    if num_threads:
        return nodes.Loader(nodes.ParallelMapper(batches, torch.tensor, num_workers=num_threads, method="thread"))
    return nodes.Loader(nodes.Mapper(batches, torch.tensor))


LOADERS: dict[str, Any] = {
    "counts": Counts,
    "a length": Sized,
    "nodes": of_nodes,
    "nodes, a generator": lambda: of_nodes(torch.Generator().manual_seed(3)),
    "nodes, threads": lambda: of_nodes(torch.Generator().manual_seed(3), 2),
}


@pytest.mark.parametrize(
    ("at", "flags", "name"),
    alternating(
        [(2, {}), (7, {}), (4, {"accumulate_grad_batches": 3}), (5, {}), (1, {"hook": "on_train_epoch_end"})], LOADERS
    ),
)
def test_goes_on(name, at, flags, tmp_path):
    assert_goes_on(LOADERS[name], tmp_path, at, **flags)
