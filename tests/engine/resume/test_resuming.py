"""A run that was stopped under one trainer goes on under the other as if nothing had been."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.pairs import alternating

from ..loop.stock_comparison import TRAINERS, Small, exactly, rows, trainer_of
from ..tiny import SavesIn, Stream


class Resumable(DataLoader):
    """Goes on after the batches that were taken before."""

    def __init__(self, num_batches: int) -> None:
        super().__init__(rows(num_batches).dataset, batch_size=4)
        self.num_taken = 0

    def __iter__(self) -> Any:
        skipped, self.num_taken = self.num_taken % len(self), 0
        for i, batch in enumerate(super().__iter__()):
            if i >= skipped:
                self.num_taken = i + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_taken = state["num_taken"]


class Scheduled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step, batch))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def run(trainer_class: type[pl.Trainer], folder: Path, checkpoint: Path | None = None, **flags: Any) -> dict[str, Any]:
    module, loader = Scheduled(), Resumable(4)
    trainer = trainer_of(trainer_class, folder, **{"max_epochs": 3, **flags})
    trainer.fit(module, loader, rows(2), ckpt_path=checkpoint, weights_only=False if checkpoint else None)
    return {
        "weights": exactly(module.state_dict()),
        "optimizers": exactly([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "progress": exactly(trainer.fit_loop.state_dict()),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "metrics": exactly(trainer.callback_metrics),
        "seen": exactly(module.seen),
    }


FLAGS = [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, {"max_steps": 13, "max_epochs": -1}]
HOOKS = [
    ("on_train_batch_end", 2),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 6),
    ("on_train_batch_start", 6),
    ("on_validation_end", 1),
    ("on_validation_batch_end", 3),
    ("on_train_epoch_start", 2),
    ("on_train_epoch_end", 1),
    ("on_train_end", 1),
]
PLACES = pytest.mark.parametrize(("flags", "hook", "at"), alternating(FLAGS, HOOKS), ids=str)


@PLACES
def test_a_file_of_lightnings_goes_on_as_under_lightning(tmp_path, hook, at, flags):
    saved = tmp_path / "saved.ckpt"
    run(pl.Trainer, tmp_path / "whole", callbacks=[SavesIn(hook, at, saved)], **flags)
    expected, found = (run(trainer, tmp_path / trainer.__name__, saved, **flags) for trainer in TRAINERS)
    assert found == expected


class Noisy(Small):
    """Draws random numbers in training, and notes the rows and the epoch of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, batch_idx, exactly(batch)))
        return super().training_step(nn.functional.dropout(batch, 0.3), batch_idx)


def noisy(folder: Path, checkpoint: Path | None = None, num_workers: int = 0, **flags: Any) -> tuple[Any, Any]:
    torch.manual_seed(3 if checkpoint is None else 4)  # a run that is resumed need not begin in the same state
    module = Noisy()
    loader = rows(5, shuffle=True, num_workers=num_workers)
    engine = trainer_of(Engine, folder, **{"max_epochs": 3, **flags})
    engine.fit(module, loader, rows(2), ckpt_path=checkpoint)
    return exactly(module.state_dict()), module.seen


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")


@PLACES
def test_ours_goes_on_as_if_nothing_had_been(tmp_path, hook, at, flags):
    """Shuffled data and dropout: the weights of the run that was not stopped, bit for bit, and each sample once."""
    saved = tmp_path / "saved.ckpt"
    saves = SavesIn(hook, at, saved)
    weights, seen = noisy(tmp_path / "whole", callbacks=[saves], **flags)
    resumed_weights, resumed_seen = noisy(tmp_path / "rest", saved, **flags)
    in_epoch = saves.num_seen % 5
    num_open = in_epoch % flags.get("accumulate_grad_batches", 1)
    assert resumed_seen == seen[saves.num_seen - num_open :]
    if num_open:  # the open window is done again with the same random numbers, and batch norm sees it twice
        resumed_weights, weights = (
            {name: value for name, value in state.items() if ".running_" not in name and "num_batches" not in name}
            for state in (resumed_weights, weights)
        )
    assert resumed_weights == weights


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 7


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("stop", [{"max_steps": 7}, {"callbacks": [Stops()], "min_epochs": 0}], ids=["max", "stop"])
@pytest.mark.parametrize("dataset", [range(15), Stream(15)], ids=["known length", "unknown length"])
def test_an_epoch_that_was_cut_short_is_gone_on_with(tmp_path, dataset, stop, hook):
    runs: list[Any] = []
    callbacks = [SavesIn(hook, 1 if hook == "on_train_end" else 2, tmp_path / "saved"), *stop.get("callbacks", [])]
    for name, flags, checkpoint in (
        ("whole", {}, None),
        ("first", {**stop, "callbacks": callbacks}, None),
        ("rest", {}, tmp_path / "saved"),
    ):
        module = Eventful(manual=False)
        engine = trainer_of(Engine, tmp_path / name, **{"max_epochs": 3, **flags})
        engine.fit(module, DataLoader(dataset, batch_size=3), ckpt_path=checkpoint)
        batches = [seen for seen in module.seen if seen[0].startswith("batch")]
        runs.append((batches, module.seen, exactly(engine.fit_loop.state_dict())))
    (whole, _, state), (first, *_), (rest, seen, resumed_state) = runs
    assert first + rest == whole
    assert len(first) == 7
    assert seen[0][0] == "batch 2", "the epoch does not start anew"
    assert resumed_state == state


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_no_digit_is_lost_in_any_precision(tmp_path, precision):
    saved = tmp_path / "saved.ckpt"
    saves = SavesIn("on_train_batch_end", 7, saved)
    weights, _ = noisy(tmp_path / "whole", callbacks=[saves], precision=precision)
    resumed_weights, _ = noisy(tmp_path / "rest", saved, precision=precision)
    assert resumed_weights == weights


class Eventful(Small):
    """Notes what happens, in two epochs of three batches."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.seen: list[tuple[str, int, int]] = []

    def note(self, what: str) -> None:
        self.seen.append((what, self.trainer.current_epoch, self.trainer.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"batch {batch_idx}")
        loss = self.loss(batch.float().reshape(-1, 1).expand(-1, 4))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_epoch_start(self) -> None:
        self.note("start")

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_train_epoch_end(self) -> None:
        self.note("end")


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("dataset", [range(9), Stream(9)], ids=["known length", "unknown length"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_step_end", "on_validation_end"])
def test_nothing_that_follows_the_last_batch_of_an_epoch_is_left_out(tmp_path, hook, dataset, manual):
    saves = SavesIn(hook, 1 if hook == "on_validation_end" else 3, tmp_path / "saved")
    runs = []
    for name, callbacks, checkpoint in (("whole", [saves], None), ("rest", [], tmp_path / "saved")):
        module = Eventful(manual)
        engine = trainer_of(Engine, tmp_path / name, max_epochs=2, callbacks=callbacks)
        engine.fit(module, DataLoader(dataset, batch_size=3), rows(1), ckpt_path=checkpoint)
        runs.append((module.seen, engine.fit_loop.epoch_loop._batches_that_stepped))
    (seen, steps), (resumed, resumed_steps) = runs
    assert resumed == seen[saves.num_seen :]
    assert resumed_steps == steps == 6


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")  # Lightning's; that is how one resumes
@pytest.mark.parametrize("first", TRAINERS, ids=lambda trainer: trainer.__name__)
def test_callbacks_and_counters_go_on(tmp_path, first):
    kept = {"save_last": True, "save_top_k": -1, "monitor": "loss_step", "every_n_train_steps": 3}
    histories = []
    for pair in ((first, Engine), (pl.Trainer, pl.Trainer)):
        folder = tmp_path / " ".join(trainer.__name__ for trainer in pair)
        folder.mkdir(exist_ok=True)
        for trainer, steps, resumed in zip(pair, (6, 11), (None, folder / "kept" / "last.ckpt"), strict=True):
            callbacks = [
                stock.ModelCheckpoint(folder / "kept", **kept),
                stock.EarlyStopping("val_loss", patience=1, min_delta=10.0),
                stock.EMAWeightAveraging(decay=0.5),
            ]
            last = run(trainer, folder / str(steps), resumed, callbacks=callbacks, max_steps=steps, max_epochs=9)
        states = [_without_paths(exactly(callback.state_dict())) for callback in callbacks]
        histories.append((last, states, sorted(path.name for path in (folder / "kept").iterdir())))
    assert histories[0] == histories[1]


def _without_paths(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if "path" not in key and key not in ("dirpath", "best_k_models")}
