"""Muon under strategies that split parameters: its products of 16 bits must not depend on where they are split."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.tiny import QUIET

ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        x, target = rows.split(32, dim=1)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()

    def configure_optimizers(self):
        return torch.optim.Muon(self.parameters(), lr=0.02)


def fit(strategy, samples, steps, devices=2):
    module = Net()
    loader = DataLoader(TensorDataset(ROWS), batch_size=samples)
    Engine(**QUIET, strategy=strategy, devices=devices, max_steps=steps, max_epochs=1).fit(module, loader)
    return module.state_dict()


def test_fsdp_is_as_ddp():
    found = fit("fsdp_fork", samples=8, steps=2)
    assert largest_difference(found, fit("ddp_fork", samples=8, steps=2)) < 1e-7
    assert largest_difference(found, Net().state_dict()) > 1e-2


@pytest.mark.nightly  # the shards of a module are above, and those of stages in the parity tests
def test_stages_in_shards_are_as_whole_ones():
    # Micro-batches are summed in the same order; reduce-scatter and the mean of two pipelines are the same numbers.
    found = fit("pp+fsdp_fork:pipeline_size=2", samples=8, steps=2, devices=4)
    assert largest_difference(found, fit("pp+ddp_fork:pipeline_size=2", samples=8, steps=2, devices=4)) < 1e-7
    assert largest_difference(found, Net().state_dict()) > 1e-2


def test_tp_is_as_a_plain_loop():
    expected = Net()
    optimizer = expected.configure_optimizers()
    expected.training_step([ROWS[:16]], 0).backward()
    optimizer.step()
    # 1e-8 of a gradient, by which sums in another order differ, can be a bit of 16-bit numbers: 2**-8 of what moves.
    assert largest_difference(fit("tp_fork", samples=16, steps=1), expected.state_dict()) < 2**-8 * 0.02
