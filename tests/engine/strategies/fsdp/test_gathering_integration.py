"""`self.all_gather` in a step: what ranks have that have samples of their own, each sample once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.engine.tiny import Seen


class Contrastive(Seen):
    """Each sample against those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        first = self.all_gather(samples).flatten(0, -2)  # of all stages
        found = normalize(self.net(samples), dim=-1)
        everyones = self.all_gather(found, sync_grads=True).flatten(0, -2)
        assert type(first) is type(everyones) is Tensor  # of no class that a module could not keep and save
        assert len(first) == len(everyones) == len(samples) * self.trainer.data_size
        logits = 5 * everyones @ normalize(first).T
        return cross_entropy(logits, torch.arange(len(everyones)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("tp_fork", 2), ("pp_fork:microbatches=1,schedule=gpipe", 2), ("pp+ddp_fork:microbatches=1,schedule=gpipe", 4)],
)
def test_each_sample_is_gathered_once(strategy, devices):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 8))

    def trained(strategy: str, devices: int) -> dict[str, Tensor]:
        run = Engine(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, **QUIET)
        module = Contrastive()
        run.fit(module, DataLoader(data, batch_size=8 // run.data_size))
        return module.state_dict()

    expected = trained("single", 1)
    assert largest_difference(trained(strategy, devices), expected) < 1e-6
    assert largest_difference(Contrastive().state_dict(), expected) > 1e-3
