"""What PowerSGD remembers from step to step is in checkpoints; with the same and another number of ranks it goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint

from ..tiny import QUIET

SAVED, STEPS = 5, 10


class Two(LightningModule):
    """Two matrices that are sent as factors, and vectors that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Saves(Callback):
    """Saves what it is told to at a step, and what the hook has as training begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        residuals = trainer.strategy.comm_hook.state_dict()["residuals"]
        torch.save(residuals, f"{self.path}-{trainer.global_rank}")

    def on_train_step_end(self, trainer: Any, pl_module: LightningModule, save_now: bool) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def train(path: Path, devices: int, **arguments: Any) -> dict[str, Tensor]:
    rows = torch.randn(8 * STEPS, 16, generator=torch.Generator().manual_seed(1))
    flags = {**QUIET, "devices": devices, "max_steps": STEPS, "callbacks": [Saves(path)]}
    module = Two()
    engine = Engine(strategy="ddp_fork", compression="powersgd:1,start=2", **flags)
    engine.fit(module, DataLoader(rows, batch_size=8 // devices), **arguments)  # type: ignore[arg-type]
    return module.state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "saved"
    return path, train(path, 2)


def test_goes_on_as_if_nothing_had_been(whole, tmp_path):
    path, expected = whole
    found = train(tmp_path / "again", 2, ckpt_path=path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("devices", [1, 4])
def test_other_ranks_have_the_same_sum_of_residuals(whole, tmp_path, devices):
    path, _ = whole
    train(tmp_path / "again", devices, ckpt_path=path)
    saved = [rank["compression"]["residuals"] for rank in load_checkpoint(path)["polyphase"]["ranks"]]
    dealt = [torch.load(f"{tmp_path / 'again'}-{rank}", weights_only=True) for rank in range(devices)]
    assert len(saved) == 2
    for name in saved[0]:
        assert saved[0][name].abs().max() > 0
        torch.testing.assert_close(sum(each[name] for each in dealt), sum(each[name] for each in saved))


def test_another_compression_is_told(whole, tmp_path):
    path, _ = whole
    engine = Engine(strategy="single", **{**QUIET, "devices": 1, "max_steps": STEPS})
    rows = torch.randn(8 * STEPS, 16, generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="saved under another `compression`"):
        engine.fit(Two(), DataLoader(rows, batch_size=8), ckpt_path=path)  # type: ignore[arg-type]
