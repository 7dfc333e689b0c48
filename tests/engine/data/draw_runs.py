"""Trains what a draw says, on one rank: the whole run, one that stops, and one that goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, seed_everything

from tests.engine.tiny import SavesIn, engine

from .draw_spec import Draw
from .kinds import ids_of, load
from .runs import Trains

LATER_EPOCHS = 3
"""Epochs after the one that is stopped."""
REFUSED = (TypeError, ValueError)
SEED = 7


class _Data(LightningDataModule):
    """Makes the loader where the engine asks for it, when the ranks are known."""

    def __init__(self, what: Draw) -> None:
        super().__init__()
        self.what = what

    def train_dataloader(self) -> Any:
        return load(self.what, _rank(), _num_ranks())


class _Ends(Callback):
    """Ends the run after some batches."""

    def __init__(self, after: int, *, raises: bool) -> None:
        self.left, self.raises = after, raises

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.raises:
            raise KeyError("the run's own")
        trainer.should_stop = trainer.should_stop or self.left == 0


class _Batches(Callback):
    """Notes all (epoch, index); a rank without a sample for a batch takes no training step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append((trainer.current_epoch, batch_idx))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _train(what: Draw, checkpoint: Path | None = None, **flags: Any) -> tuple[list[Any], Any]:
    """This rank's (epoch, index, samples), and the engine."""
    seed_everything(SEED if checkpoint is None else SEED + 1, verbose=False)
    ranks = {"strategy": "ddp", "devices": _num_ranks()} if _num_ranks() > 1 else {}
    given = {"accumulate_grad_batches": what.accumulate, "limit_train_batches": what.limit, **ranks, **flags}
    given["reload_dataloaders_every_n_epochs"] = what.reload
    module, trainer = Trains(), engine(**given)
    try:
        trainer.fit(module, datamodule=_Data(what), ckpt_path=checkpoint)
    except KeyError:  # `_Ends`
        pass
    except REFUSED as error:
        if module.seen:
            raise RuntimeError("refused after the first step") from error
        raise
    return [(epoch, index, ids_of(batch)) for epoch, index, batch in module.seen], trainer


def begin(what: Draw, path: Path) -> dict[str, Any]:
    """Runs the whole of it, and a second one that stops; the checkpoint of that is at `path`.

    Returns:
        Of this rank, `whole`: all batches, `done`: those that a run that goes on does not do again; `refused`, if so.
    """
    most = 1 + what.stop_after // 2 + LATER_EPOCHS
    try:
        counts = _Batches()
        whole, _ = _train(what, max_epochs=most, callbacks=[counts])
    except REFUSED as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    batches = counts.found
    epochs = [epoch for epoch, _ in batches]
    at = min(what.stop_after, len(batches) - 1)
    at = min(at, sum(epoch <= most - LATER_EPOCHS - 1 for epoch in epochs))
    window = what.accumulate
    if what.stop == "max_steps":
        # The step that the batch `at` is of ends there, or with the epoch.
        while at < len(batches) and (epochs[at - 1] == epochs[at] and (batches[at - 1][1] + 1) % window):
            at += 1
    flags: dict[str, Any] = {"max_epochs": epochs[at - 1] + 1 + LATER_EPOCHS}
    if what.stop == "max_steps":
        steps = sum(
            i + 1 == len(batches) or epochs[i] != epochs[i + 1] or not (batches[i][1] + 1) % window for i in range(at)
        )
        stopped, trainer = _train(what, max_steps=steps, **flags)
    elif what.stop == "should_stop":
        stopped, trainer = _train(what, callbacks=[_Ends(at, raises=False)], **flags)
    else:
        callbacks: list[Any] = [SavesIn("on_train_batch_end", at, path)]
        if what.stop == "exception":
            callbacks.append(_Ends(at, raises=True))
        stopped, trainer = _train(what, callbacks=callbacks, **flags)
    if what.stop in ("max_steps", "should_stop"):
        trainer.save_checkpoint(path)
    if epochs[at - 1] == epochs[at]:
        at -= (batches[at - 1][1] + 1) % window  # an unfinished window is done again
    last = flags["max_epochs"]
    return {
        "whole": [item for item in whole if item[0] < last],
        "stopped": stopped,
        "done": sum((epoch, index) in batches[:at] for epoch, index, _ in whole),
        "max_epochs": last,
    }


def go_on(what: Draw, path: Path, max_epochs: int) -> dict[str, Any]:
    """What this rank is trained on when the stopped run goes on."""
    later = replace(what, batch_size=what.later_batch_size, num_workers=what.later_num_workers)
    later = replace(later, persistent=what.persistent and later.num_workers > 0)
    try:
        return {"rest": _train(later, path, max_epochs=max_epochs)[0]}
    except REFUSED as error:
        return {"refused": f"{type(error).__name__}: {error}"}
