"""Blocks that hand each other a dataclass, or an object of a class that no strategy looks into."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from tests.engine.parity import largest_difference
from tests.engine.tiny import engine

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass
class Data:
    x: Tensor
    penalty: Tensor


class Plain:
    def __init__(self, x: Tensor, penalty: Tensor) -> None:
        self.x, self.penalty = x, penalty


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, handed: Any) -> Any:
        x = self.linear(handed.x).tanh()
        return type(handed)(x, handed.penalty + x.square().mean())


class Net(LightningModule):
    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        handed = self.kind(batch, batch.new_zeros(()))
        for block in self.blocks:
            handed = block(handed)
        return self.head(handed.x).square().mean() + 0.1 * handed.penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(kind: type, strategy: str) -> dict[str, Tensor]:
    net = Net(kind)
    engine(strategy=strategy, devices=2, max_epochs=1, global_batch_size=8).fit(net, DataLoader(INPUTS, batch_size=4))
    return net.state_dict()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("strategy", "kind"), [("pp_fork", Data), ("fsdp_fork", Data), ("fsdp_fork", Plain), ("zero1_fork", Plain)]
)
def test_training_is_that_of_one_process(strategy, kind):
    plain = Net(kind)
    optimizer = plain.configure_optimizers()
    for batch in INPUTS.split(8):
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        optimizer.step()
    assert largest_difference(fitted(kind, strategy), plain.state_dict()) <= 1e-6


@pytest.mark.timeout(60)
def test_a_pipeline_refuses_an_object_that_it_does_not_see_into():
    with pytest.raises(
        ProcessRaisedException, match=r"'blocks\.0' returns an object of Plain, whose tensors a pipeline"
    ):
        fitted(Plain, "pp_fork")
