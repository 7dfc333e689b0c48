"""Recurrent layers, whose weights must stay where they were gathered."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.distributed import in_a_fork
from tests.engine.tiny import QUIET
from tests.pairs import nightly


class Recurrent(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(4))
        self.may_move = []

    def training_step(self, batch, batch_idx):
        self.may_move += ["flatten_parameters" not in vars(block) for block in self.blocks]
        for block in self.blocks:
            batch = batch + block(batch)[0]
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(strategy):
    module = Recurrent()
    data = DataLoader(torch.randn(8, 3, 8), batch_size=4)
    Engine(strategy=strategy, devices=1, max_epochs=1, **QUIET).fit(module, data)
    return set(module.may_move), [name for name, part in module.named_modules() if "flatten_parameters" in vars(part)]


@pytest.mark.parametrize(
    ("strategy", "moves"), [("fsdp", False), ("ddp", True), *nightly(("pp+fsdp:pipeline_size=1", False))]
)
def test_no_layer_moves_gathered_weights(strategy, moves):
    may_move, changed = in_a_fork(_trained, strategy, timeout_s=60)  # with its process group
    assert may_move == {moves}
    assert changed == [], "layers are as they were"
