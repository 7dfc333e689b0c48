"""The smallest modules and flags that the unit tests train with."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyphase.engine import Engine

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def engine(**flags: Any) -> Engine:
    """An engine on one CPU that writes and shows nothing, unless `flags` say otherwise."""
    return Engine(**{**QUIET, "devices": 1, "max_epochs": 1, **flags})


def as_rank(rank: int) -> None:
    """Has the engines of this process be rank `rank` of the group that is there, rather than start processes."""
    # Lightning: LightningEnvironment takes these for a sign that somebody else has started all processes.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


class Positions(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers below `size`; its length is known only at the end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class CountingStream(Stream):
    """A stream that says where it is, and continues there."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Seen(LightningModule):
    """Its loss is its one weight, whose gradient is therefore 1; notes the batches it sees, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.epochs: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.epochs[-1].append(batch.tolist())
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Regression(LightningModule):
    """A linear model of a made-up target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StepsByHand(LightningModule):
    """A mixin for manual optimization with one optimizer: the next class has the loss."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def rows(size: int = 16, *, batch_size: int = 4, **arguments: Any) -> DataLoader:
    """A loader of `size` rows of four numbers each, always the same."""
    data = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=batch_size, **arguments)  # type: ignore[arg-type]


class Saves(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SavesIn(Callback):
    """Saves a checkpoint the n-th time that a hook is called, and notes how much the module had `seen` by then."""

    num_seen: int | None = None

    def __init__(self, hook: str, at: int, path: Path) -> None:
        self._num_calls = 0

        def save(trainer: Any, module: LightningModule, *_: Any, **__: Any) -> None:
            self._num_calls += 1
            if self._num_calls == at:
                self.num_seen = len(getattr(module, "seen", ()))
                trainer.save_checkpoint(path)

        setattr(self, hook, save)
