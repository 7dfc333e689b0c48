"""A run of workers ends, however many tensors its module has."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.engine.tiny import engine


class Many(LightningModule):
    """The names of its tensors alone are more than a pipe holds, which the parent reads when the workers have ended."""

    def __init__(self):
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.zeros(1) for _ in range(4000))

    def training_step(self, batch, batch_idx):
        return (torch.cat(list(self.tensors)) - batch.mean()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.timeout(120)
def test_a_run_of_workers_ends_with_thousands_of_tensors():
    module = Many()
    engine(strategy="ddp_fork", devices=2, max_steps=1).fit(module, DataLoader(torch.ones(8, 1), 4))
    assert all(tensor.item() > 0 for tensor in module.tensors)
