"""What is exported is what stock Lightning would have written, and goes on in its Trainer; or the weights alone."""

import os
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import safetensors
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from safetensors.torch import load_file

from polyphase.engine import Engine
from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, load_checkpoint
from polyphase.engine.checkpoint.export import export

from ..loop.stock_comparison import Small, exactly, rows, trainer_of
from ..tiny import SavesIn
from .sample_checkpoints import content, same, save


class Scheduled(Small):
    """With hyperparameters, a scheduler, a state of its own, and one tensor under two names."""

    def __init__(self, lr: float = 0.05, width: int = 8) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.register_buffer("same", self.head.weight.detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.backbone.parameters()}])
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"large": torch.ones(300_000), "note": "of my own"}


def run(trainer_class: type[pl.Trainer], folder: Path, *more: pl.Callback, path: Path | None = None) -> dict[str, Any]:
    module = Scheduled()
    callbacks = [EMAWeightAveraging(decay=0.5), EarlyStopping("val_loss", patience=9), *more]
    trainer = trainer_of(trainer_class, folder, callbacks=callbacks, max_epochs=3)
    trainer.fit(module, rows(4), rows(2), ckpt_path=path)
    return {
        "weights": exactly(module.state_dict()),
        "optimizers": exactly([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "callbacks": [exactly(callback.state_dict()) for callback in callbacks],
        "progress": (trainer.current_epoch, trainer.global_step),
    }


@pytest.fixture(params=[("on_train_epoch_end", 1), ("on_train_batch_end", 6), ("on_train_end", 1)], ids=str)
def pair(request, tmp_path) -> tuple[Path, Path]:
    """What Lightning saved, and what was exported of what the engine saved at the same time."""
    paths = (tmp_path / "theirs.ckpt", tmp_path / "ours")
    for trainer, path in zip((pl.Trainer, Engine), paths, strict=True):
        run(trainer, tmp_path / trainer.__name__, SavesIn(*request.param, path))
    assert export(str(paths[1]), str(tmp_path / "out" / "ours.ckpt")) == []
    return paths[0], tmp_path / "out" / "ours.ckpt"


def test_it_is_what_lightning_would_have_written(pair):
    theirs, ours = (torch.load(path, weights_only=True) for path in pair)
    assert len(ours.pop("polyphase")["ranks"]) == 1
    assert same(ours, theirs)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_lightning_goes_on_from_it_as_from_its_own(pair, tmp_path):
    theirs, ours = (run(pl.Trainer, tmp_path / f"from {path.stem}", path=path) for path in pair)
    assert ours == theirs


def test_the_engine_goes_on_from_it_as_if_nothing_had_been(pair, tmp_path):
    assert run(Engine, tmp_path / "rest", path=pair[1]) == run(Engine, tmp_path / "whole")


def test_modules_open_it(pair):
    modules = [Scheduled.load_from_checkpoint(path) for path in pair]
    assert same(*(dict(module.state_dict()) for module in modules))
    assert modules[0].hparams == modules[1].hparams


def test_safetensors_have_the_weights_alone(tmp_path):
    run(Engine, tmp_path / "run", SavesIn("on_train_end", 1, tmp_path / "ours"))
    assert export(str(tmp_path / "ours"), str(tmp_path / "x.safetensors")) == []
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    expected = load_checkpoint(tmp_path / "ours")["state_dict"]
    assert same(load_file(tmp_path / "x.safetensors"), dict(expected))
    Scheduled().load_state_dict(load_file(tmp_path / "x.safetensors"))


def test_what_is_no_tensor_is_said_to_be_left_out(tmp_path):
    state = {"w": torch.ones(2), "part._extra_state": {"version": 1}}
    path = save(tmp_path / "x", state_dict=state)
    assert export(path, str(tmp_path / "x.safetensors")) == ["part._extra_state"]
    assert same(load_file(tmp_path / "x.safetensors"), {"w": torch.ones(2)})
    export(path, str(tmp_path / "x.ckpt"))
    assert same(torch.load(tmp_path / "x.ckpt")["state_dict"], state)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_urls(tmp_path, suffix):
    folder = f"memory://{tmp_path.name}"
    path = save(f"{folder}/x")
    export(path, f"{folder}/out{suffix}")
    fs, root = fsspec.core.url_to_fs(folder)
    fs.get_file(f"{root}/out{suffix}", tmp_path / f"out{suffix}")
    state = content(1)["state_dict"]
    read = load_file if suffix == ".safetensors" else lambda name: torch.load(name)["state_dict"]
    assert same(read(tmp_path / f"out{suffix}"), state)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_damaged_one_is_not_exported(tmp_path, suffix):
    path = save(tmp_path / "x")
    os.truncate(f"{path}/rest.pt", 10)
    with pytest.raises(CheckpointError, match=r"x is damaged: rest\.pt has 10 bytes instead"):
        export(path, f"{tmp_path}/out{suffix}")
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_is_replaced_only_if_that_is_wanted(tmp_path):
    path, to = save(tmp_path / "x"), tmp_path / "out.ckpt"
    to.write_text("mine")
    with pytest.raises(ValueError, match=r"out\.ckpt is there already: give another name, or overwrite=True"):
        export(path, str(to))
    assert to.read_text() == "mine"
    export(path, str(to), overwrite=True)
    assert torch.load(to)["global_step"] == 1
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"folder\.ckpt is a folder: give the name of a file"):
        export(path, str(tmp_path / "folder.ckpt"), overwrite=True)


def test_other_endings_are_refused_with_the_closest(tmp_path):
    with pytest.raises(ValueError, match=r"unknown ending '\.safetensor'\. Did you mean '\.safetensors'\?"):
        export(save(tmp_path / "x"), f"{tmp_path}/out.safetensor")


def test_without_weights_there_is_nothing_to_export(tmp_path):
    saver = AsyncCheckpointer()
    about = {"step": 1, "epoch": 0, "layout": {}, "world_size": 1, "versions": {}}
    saver.save({"global_step": 1}, str(tmp_path / "x"), about=about, of_rank={}, in_background=False)
    with pytest.raises(CheckpointError, match="x has no weights: it has global_step, polyphase"):
        export(str(tmp_path / "x"), f"{tmp_path}/out.safetensors")


class Custom:
    """What only unpickling could bring back."""


def test_objects_need_trust(tmp_path):
    with pytest.warns(UserWarning, match="no plain values"):
        path = save(tmp_path / "x", mine=Custom())
    with pytest.raises(CheckpointError, match="holds objects that are no plain values"):
        export(path, f"{tmp_path}/out.ckpt")
    export(path, f"{tmp_path}/out.ckpt", weights_only=False)
    assert isinstance(torch.load(tmp_path / "out.ckpt", weights_only=False)["mine"], Custom)
