"""A recurrent network on a stream: signals that are made as they are read, without a length, split over the ranks.

python examples/stream.py --strategy ddp --devices 2 --accelerator cpu
"""

import argparse
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from polyphase import Engine

LENGTH = 64


class Signals(IterableDataset[Tensor]):
    """Two sine waves and some noise, [LENGTH, 1]; the stream of each rank and worker has every n-th of them."""

    def __init__(self, first: int, num_shards: int = 1, index: int = 0) -> None:
        self.number, self.stride = first + index, num_shards

    def shard(self, num_shards: int, index: int) -> "Signals":
        """A part of this stream: the engine asks for one for each rank."""
        return Signals(self.number, num_shards, index)

    def __iter__(self) -> Iterator[Tensor]:
        number = self.number
        while True:
            draw = torch.Generator().manual_seed(number)
            speed, phase = 0.1 + 0.4 * torch.rand(2, generator=draw), 6.3 * torch.rand(2, generator=draw)
            waves = torch.sin(torch.arange(LENGTH)[:, None] * speed + phase).sum(1, keepdim=True)
            yield waves + 0.05 * torch.randn(LENGTH, 1, generator=draw)
            number += self.stride


class Forecast(LightningModule):
    """Predicts the next value of a signal at each place."""

    def __init__(self, width: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.recurrent = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.recurrent(signals)[0])

    def training_step(self, signals: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(signals[:, :-1]), signals[:, 1:])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def test_step(self, signals: Tensor, batch_idx: int) -> None:
        self.log("test/loss", functional.mse_loss(self(signals[:, :-1]), signals[:, 1:]), sync_dist=True)
        self.log("test/loss_of_the_last_value", functional.mse_loss(signals[:, :-1], signals[:, 1:]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"], fused=self.on_gpu or None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_steps", type=int, default=300, help="optimizer steps; the stream has no end")
    seed_everything(0)
    engine, module = Engine(**vars(parser.parse_args()), limit_test_batches=20, log_every_n_steps=50), Forecast()
    engine.fit(module, DataLoader(Signals(first=10_000), batch_size=32))
    engine.test(module, DataLoader(Signals(first=0), batch_size=32))
