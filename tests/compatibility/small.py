"""The module and the data of all patterns."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def loader(batch_size: int = 4, **arguments: Any) -> DataLoader:
    return DataLoader(TensorDataset(ROWS), batch_size=batch_size, **arguments)


class Small(LightningModule):
    """Six batches an epoch; logs in every stage; notes the losses."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)

    def _loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}

    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return loader()

    test_dataloader = predict_dataloader = val_dataloader


class SmallData(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(str(getattr(stage, "value", stage)))

    def train_dataloader(self):
        return loader(self.batch_size, shuffle=True)

    def val_dataloader(self):
        return loader(self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self):
        return {"stages": list(self.stages)}

    def load_state_dict(self, state):
        self.loaded = state
