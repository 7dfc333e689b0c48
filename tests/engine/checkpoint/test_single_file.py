"""A checkpoint that is one file: whole or not there, checked before it is opened, and stock Lightning's as it is."""

import os
import shutil
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from polyphase.engine import Engine
from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, is_checkpoint, read_manifest, repair
from polyphase.engine.checkpoint.engine_io import EngineIO
from polyphase.engine.checkpoint.retention import list_entries, prune
from polyphase.engine.checkpoint.single_file import manifest_text, wrong_in
from polyphase.engine.checkpoint.whole import write_file

from ..loop.stock_comparison import Small, exactly, rows, trainer_of
from ..tiny import Regression, engine
from ..tiny import rows as four


def saved(path: Path | str, **flags: Any) -> str:
    run = engine(**flags)
    run.fit(Regression(), four())
    run.save_checkpoint(path)
    return str(path)


def test_what_it_holds_is_plain_and_stock_lightning_goes_on_with_it(tmp_path):
    run = trainer_of(Engine, tmp_path / "first", max_epochs=1)
    run.fit(Small(), rows(4), rows(2))
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert "polyphase" in torch.load(tmp_path / "x.ckpt", weights_only=True)
    weights = []
    for trainer_class in (pl.Trainer, Engine):
        module = Small()
        trainer = trainer_of(trainer_class, tmp_path / trainer_class.__name__, max_epochs=2)
        trainer.fit(module, rows(4), rows(2), ckpt_path=tmp_path / "x.ckpt")
        assert trainer.global_step == 2 * run.global_step
        weights.append(exactly(module.state_dict()))
    assert weights[0] == weights[1]


def test_the_first_one_takes_half_as_many_calls_more_as_a_plain_save(tmp_path):
    weights = {str(number): torch.zeros(2) for number in range(500)}
    checkpoint, files = {"state_dict": weights, "pytorch-lightning_version": "2"}, EngineIO(AsyncCheckpointer())

    def calls_of(save: Callable[[], None]) -> int:
        with Profile(subcalls=False, builtins=False) as profile:
            save()
        return sum(entry.callcount for entry in profile.getstats())

    calls_of(lambda: torch.save(checkpoint, tmp_path / "warm"))
    plain = calls_of(lambda: torch.save(checkpoint, tmp_path / "plain"))
    assert calls_of(lambda: files.save_checkpoint(checkpoint, tmp_path / "x.ckpt")) < 1.5 * plain


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_it_is_moved_copied_and_linked_like_any_file(tmp_path):
    keeps = ModelCheckpoint(tmp_path / "kept", save_last="link")
    engine(callbacks=[keeps], enable_checkpointing=True).fit(Regression(), four())
    assert os.path.islink(tmp_path / "kept" / "last.ckpt")
    shutil.copyfile(tmp_path / "kept" / "last.ckpt", tmp_path / "copy")
    os.remove(keeps.best_model_path)
    again = engine(max_epochs=2, callbacks=[ModelCheckpoint(tmp_path / "kept")], enable_checkpointing=True)
    again.fit(Regression(), four(), ckpt_path=tmp_path / "copy")
    assert again.global_step == 8


@pytest.mark.parametrize("form", ["file", "directory"])
def test_it_is_there_when_the_save_returns(tmp_path, form):
    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            path = tmp_path / str(trainer.global_step)
            trainer.save_checkpoint(path)
            assert is_checkpoint(path)
            assert path.is_dir() is (form == "directory")

    engine(callbacks=[Looks()], checkpoint_format=form).fit(Regression(), four())
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "4"]


def test_formats_that_can_not_be():
    with pytest.raises(ValueError, match="checkpoint_format='file' is not for strategy 'pp'"):
        Engine(strategy="pp", devices=2, accelerator="cpu", checkpoint_format="file")
    with pytest.raises(ValueError, match="leave it out with a CheckpointIO of your own"):
        engine(plugins=[TorchCheckpointIO()], checkpoint_format="directory")


# --- what is wrong with one


def test_a_file_that_ends_too_early_is_found_wherever_it_ends(tmp_path):
    content = Path(saved(tmp_path / "x")).read_bytes()
    for length in range(4, len(content), 97):
        (tmp_path / "half").write_bytes(content[:length])
        assert wrong_in(tmp_path / "half"), length


def test_ranks_that_share_the_work_find_what_one_finds(tmp_path):
    path = Path(saved(tmp_path / "x"))
    weight = torch.load(path)["state_dict"]["net.0.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    assert wrong_in(path) == []
    content[content.index(weight)] ^= 1
    path.write_bytes(content)
    (wrong,) = wrong_in(path)
    assert sorted(each for rank in range(3) for each in wrong_in(path, (rank, 3))) == [wrong]


def test_of_a_file_without_checksums_its_form_is_checked(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(1000)}, tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    assert wrong_in(tmp_path / "x") == []
    assert manifest_text(tmp_path / "x") is None
    with pytest.raises(CheckpointError, match="no checkpoint of Polyphase's, or damaged"):
        read_manifest(tmp_path / "x")


def test_the_last_text_that_looks_like_a_manifest_counts(tmp_path):
    inner = torch.load(saved(tmp_path / "x"))["polyphase"]["manifest"]
    run = engine(max_epochs=2)
    run.fit(Regression(), four())

    class Copies(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["copied"] = inner

    run.callbacks.append(Copies())  # type: ignore[attr-defined]
    run.save_checkpoint(tmp_path / "y")
    assert [read_manifest(tmp_path / name).step for name in "xy"] == [4, 8]


# --- a folder of them


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    path = Path(saved(tmp_path / "x"))
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write_file({"pytorch-lightning_version": "2", "bad": lambda: None}, str(path))
    assert os.listdir(tmp_path) == ["x"]
    assert path.read_bytes() == before


def test_what_a_killed_save_has_left_is_finished_or_removed(tmp_path):
    path = Path(saved(tmp_path / "x"))
    content = path.read_bytes()
    (tmp_path / ".saving-0123456789ab").write_bytes(content[:1000])
    os.rename(path, tmp_path / ".saving-ba9876543210")
    (tmp_path / ".saving-notes").write_text("mine")
    kinds = [entry.kind for entry in list_entries(tmp_path)]
    assert kinds == ["unfinished", "unfinished"]
    assert repair(tmp_path) == [str(path)]
    assert sorted(os.listdir(tmp_path)) == [".saving-notes", "x"]
    assert path.read_bytes() == content


def test_a_folder_lists_and_prunes_files(tmp_path):
    keeps = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
    engine(callbacks=[keeps], enable_checkpointing=True).fit(Regression(), four())
    torch.save({"state_dict": {}}, tmp_path / "another.ckpt")
    assert [entry.manifest.step for entry in list_entries(tmp_path) if entry.manifest] == [4, 3, 2, 1]
    assert len(prune(tmp_path, keep_last=1).removed) == 3
    assert sorted(os.listdir(tmp_path)) == [".lock", "another.ckpt", "epoch=0-step=4.ckpt"]


def test_a_file_takes_the_place_of_a_directory_and_back(tmp_path):
    for form in ("directory", "file", "directory"):
        path = Path(saved(tmp_path / "x", checkpoint_format=form))
        assert path.is_dir() is (form == "directory")
        assert os.listdir(tmp_path) == ["x"]


def test_urls(tmp_path):
    path = saved(f"memory://{tmp_path.name}/x.ckpt")
    assert wrong_in(path) == []
    again = engine(max_epochs=2)
    again.fit(Regression(), four(), ckpt_path=path)
    assert again.global_step == 8


def test_prune_leaves_an_unfinished_one_of_a_newer_version(tmp_path, monkeypatch):
    left = Path(shutil.move(saved(tmp_path / "x.ckpt"), tmp_path / ".saving-0123456789ab"))
    monkeypatch.setattr("polyphase.engine.checkpoint.manifest.FORMAT", 1)
    pruned = prune(tmp_path, keep_last=1)
    assert pruned.removed == pruned.renamed == []
    (note,) = pruned.notes
    assert "is unfinished, and left for the newer version that wrote it" in note
    assert left.exists()
