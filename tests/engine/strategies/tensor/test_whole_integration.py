"""Layers whose forward does not go with the plan."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET

from .attentions import DIM, Fused, Residual, Unfolded

DATA = torch.randn(32, 8, DIM, generator=torch.Generator().manual_seed(0))


class Counting(Unfolded):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + super().forward(x)


class UnfoldedHeads(Fused):
    """Does to one matrix for q, k and v what torch has no rule for."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = self.qkv(x).unfold(-1, DIM, DIM).unflatten(-1, (self.num_heads, -1))
        return heads.permute(2, 0, 3, 1, 4).unbind()


class Misfits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Counting(), UnfoldedHeads(), Residual(), Counting(), nn.LayerNorm(DIM))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class MisfitsWithBlocks(Misfits):
    def shard_units(self) -> list[nn.Module]:
        return list(self.net)[:-1]


def fit(flag: str, devices: int = 2, make: type[Misfits] = Misfits) -> Misfits:
    module = make()
    engine = Engine(strategy=flag, devices=devices, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(module, DataLoader(DATA, batch_size=8))
    return module


@pytest.mark.parametrize("flag", ["tp_fork", "tp_fork:sequence_parallel=true,activation_checkpointing=true"])
def test_what_does_not_fit_is_computed_by_every_rank(flag, tmp_path):
    expected = Misfits()
    optimizer: Any = expected.configure_optimizers()
    for batch in DATA.split(8):
        optimizer.zero_grad()
        (expected.net(batch) - 1).square().mean().backward()
        optimizer.step()
    logger, handler = logging.getLogger("lightning.pytorch"), logging.FileHandler(tmp_path / "log")
    logger.addHandler(handler)  # of the ranks too, which are forked
    try:
        found = fit(flag, make=MisfitsWithBlocks).state_dict()
    finally:
        logger.removeHandler(handler)
        handler.close()
    said = (tmp_path / "log").read_text()
    for name in ("Counting", "UnfoldedHeads"):
        assert said.count(f"Every tensor-parallel rank computes the whole of each {name},") == 1
    assert largest_difference(found, expected.state_dict()) <= TOLERANCE
    assert largest_difference(found, Misfits().state_dict()) > 100 * TOLERANCE


def test_with_shards_it_is_refused_by_name():
    with pytest.raises(ProcessRaisedException, match="the forward of Counting does not go with the derived tensor-par"):
        fit("fsdp+tp_fork:tp=2")
