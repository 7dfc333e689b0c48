"""Recurrent layers, whose weights must stay where they were gathered."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine, register_strategy
from polyphase.engine.strategies.fsdp.strategy import FSDP
from polyphase.engine.strategies.options import FSDPOptions, PPFSDPOptions
from polyphase.engine.strategies.pipeline.strategy import Pipeline
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
    register_strategy("sharded", FSDP, options=FSDPOptions, description="shards on one device, too")
    register_strategy("sharded_stage", Pipeline, options=PPFSDPOptions, description="a sharded stage of its own")
    module = Recurrent()
    data = DataLoader(torch.randn(8, 3, 8), batch_size=4)
    Engine(strategy=strategy, devices=1, max_epochs=1, **QUIET).fit(module, data)
    return set(module.may_move), [name for name, part in module.named_modules() if "flatten_parameters" in vars(part)]


@pytest.mark.parametrize(
    ("strategy", "moves"),
    [("sharded", False), ("ddp", True), *nightly(("sharded_stage", False))],
)
def test_no_layer_moves_gathered_weights(strategy, moves):
    may_move, changed = in_a_fork(_trained, strategy, timeout_s=60)  # with its process group
    assert may_move == {moves}
    assert changed == [], "layers are as they were"
