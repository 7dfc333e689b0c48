"""A layer that stays whole inside of a block that is split: behind it each rank has a summand of a gradient."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import QUIET, TOLERANCE, largest_difference
from tests.pairs import nightly

DATA = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = nn.Sequential(nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Block(), Block(), Block())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def plain_loop(clip: float, algorithm: str) -> dict[str, Tensor]:
    module = Net()
    optimizer: Any = module.configure_optimizers()
    for batch in DATA.split(8):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        else:
            nn.utils.clip_grad_value_(module.parameters(), clip)
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(("clip", "algorithm"), [(0.1, "norm"), (0.003, "value")])
@pytest.mark.parametrize(("flag", "devices"), [("tp_fork", 2), *nightly(("fsdp+tp_fork:tp=2", 4))])
def test_its_gradients_are_clipped_as_whole_ones(flag, devices, clip, algorithm):
    module = Net()
    engine = Engine(
        strategy=flag,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        check_first_steps=True,  # which reads the norm as well
        **QUIET,
    )
    engine.fit(module, DataLoader(DATA, batch_size=8 // engine.data_size))
    assert largest_difference(module.state_dict(), plain_loop(clip, algorithm)) <= TOLERANCE
