"""Runs that are stopped and gone on with, and what they were trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset

from ..tiny import Seen, engine


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


class SavesAfter(Callback):
    """Saves a checkpoint in a hook's n-th call, and notes how many batches had been trained on."""

    def __init__(self, path: Path, at: int, hook: str = "on_train_batch_end") -> None:
        self.path = path
        self.at = at
        self.num_seen: int | None = None
        self._calls = 0
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self._calls += 1
        if self._calls == self.at:
            self.num_seen = len(module.batches)
            trainer.save_checkpoint(self.path)


class Trains(Seen):
    """Notes all its batches, with their epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append((self.trainer.current_epoch, batch_idx, _plain(batch)))
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _plain(part) for name, part in batch.items()}
    return batch.tolist() if isinstance(batch, Tensor) else batch


def train(make_loader: Callable[[], Any], ckpt_path: Path | None = None, **flags: Any) -> list[Any]:
    """All (epoch, index, batch) of a run; the state of torch's generator before it is another each time."""
    torch.seed()
    module = Trains()
    engine(**{"max_epochs": 3, **flags}).fit(module, make_loader(), ckpt_path=ckpt_path)
    return module.batches


def assert_goes_on(make_loader: Callable[[], Any], folder: Path, at: int, **flags: Any) -> None:
    """Trains, saving in a hook, and goes on from there; together it was the uninterrupted run, which saves nothing."""
    hook = flags.pop("hook", "on_train_batch_end")
    expected = train(make_loader, **flags)
    saves = SavesAfter(folder / "saved", at, hook)
    assert train(make_loader, callbacks=[saves], **flags) == expected, "saving changes nothing"
    assert saves.num_seen is not None
    window = flags.get("accumulate_grad_batches", 1)
    done = saves.num_seen
    in_epoch = sum(epoch == expected[done - 1][0] for epoch, _, _ in expected[:done])
    if done < len(expected) and expected[done][0] == expected[done - 1][0]:
        done -= in_epoch % window  # an unfinished window is done again
    assert train(make_loader, folder / "saved", **flags) == expected[done:]


def combined(mode: str, **loaders: Any) -> CombinedLoader:
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]
