"""torch's `linear_cross_entropy` in chunks, which reads the weight of the output layer and never calls the layer."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions, functional
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.data.packing import PackSequences
from polyphase.models import TokenGPT
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

DATA = torch.randint(50, (16, 9), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Words(LightningModule):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        options = LinearCrossEntropyOptions(batch_chunk_size=16)
        return functional.linear_cross_entropy(
            x.flatten(0, 1), self.head.weight, batch[:, 1:].flatten(), options=options
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("flag", "batch_size"),
    [
        ("tp_fork", 8),
        ("cp_fork", 8),
        ("fsdp_fork", 4),
        *nightly(("pp_fork", 8)),
    ],
)
def test_the_weights_are_those_of_one_process(flag, batch_size, tied):
    expected = Words(tied)
    optimizer = expected.configure_optimizers()
    for batch in DATA.split(8):
        optimizer.zero_grad()
        expected.training_step(batch, 0).backward()
        optimizer.step()
    module = Words(tied)
    engine = Engine(strategy=flag, devices=2, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(module, DataLoader(DATA, batch_size=batch_size))
    assert largest_difference(module.state_dict(), expected.state_dict()) <= TOLERANCE
    assert largest_difference(module.state_dict(), Words(tied).state_dict()) > 100 * TOLERANCE


class Pairs(TokenGPT):
    validation_step = None

    def training_step(self, batch: Tensor | dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def pairs() -> Pairs:
    torch.manual_seed(0)
    return Pairs(num_layers=2, dim=16, num_heads=2, context_length=16)


def whole(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    """Some predict less than others, and one rank's part of the time less than the other's."""
    return PackSequences(16)([{"input_ids": row[:length]} for row, length in zip(rows, (16, 9, 5, 3), strict=True)])


@pytest.mark.parametrize(
    ("flag", "num_ranks", "collate"),
    [("cp_fork", 2, packed), *nightly(("cp_fork:attention=ring", 2, whole), ("fsdp+cp_fork:cp=2", 4, whole))],
)
def test_a_gpt_of_65536_tokens_is_that_of_one_process_where_sequences_are_split(flag, num_ranks, collate):
    data = list(torch.randint(65_536, (12, 17), generator=torch.Generator().manual_seed(0)))
    expected = pairs()
    optimizer = expected.configure_optimizers()
    for first in range(0, 12, 4):
        optimizer.zero_grad()
        expected.training_step(collate(data[first : first + 4]), 0).backward()
        optimizer.step()
    module = pairs()
    engine = Engine(strategy=flag, devices=num_ranks, accelerator="cpu", max_epochs=1, check_first_steps=True, **QUIET)
    engine.fit(module, DataLoader(data, batch_size=4 // engine.data_size, collate_fn=collate))
    assert largest_difference(module.state_dict(), expected.state_dict()) <= TOLERANCE
    assert largest_difference(module.state_dict(), pairs().state_dict()) > 100 * TOLERANCE
