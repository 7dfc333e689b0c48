"""Runs that are stopped and gone on with, and what they were trained on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from ..tiny import SavesIn, Seen, engine


class Trains(Seen):
    """Notes all its batches, with their epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.current_epoch, batch_idx, _plain(batch)))
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _plain(part) for name, part in batch.items()}
    return batch.tolist() if isinstance(batch, Tensor) else batch


def train(make_loader: Callable[[], Any], ckpt_path: Path | None = None, **flags: Any) -> list[Any]:
    """All (epoch, index, batch) of a run; one that is resumed begins with other random numbers than the others."""
    seed_everything(7 if ckpt_path is None else 8, verbose=False)
    module = Trains()
    engine(**{"max_epochs": 3, **flags}).fit(module, make_loader(), ckpt_path=ckpt_path)
    return module.seen


_uninterrupted = cache(train)
"""Kept, since several cells of a test compare with the run of the same loader."""


def assert_goes_on(make_loader: Callable[[], Any], folder: Path, at: int, **flags: Any) -> None:
    """Trains, saving in a hook, and resumes there; together it was the uninterrupted run, which saves nothing."""
    hook = flags.pop("hook", "on_train_batch_end")
    expected = _uninterrupted(make_loader, **flags)
    saves = SavesIn(hook, at, folder / "saved")
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
