"""Every way in which Lightning saves and loads, and what is said where a checkpoint does not fit; one process."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine.checkpoint import CheckpointError, commands, find, is_checkpoint, load_checkpoint
from polyphase.engine.checkpoint.manifest import MANIFEST, _crc_of

from ..tiny import Positions, Regression, Seen, Stream, engine, rows


def saved(folder: Path, module: LightningModule | None = None, **flags: Any) -> Path:
    """A checkpoint after one epoch of four steps."""
    run = engine(**flags)
    run.fit(module or Regression(), rows())
    run.save_checkpoint(folder / "saved")
    return folder / "saved"


def state(module: nn.Module) -> dict[str, list[Any]]:
    return {key: value.tolist() for key, value in module.state_dict().items()}


# --- what does not fit


class Wider(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
        self.extra = nn.Linear(2, 2)


def test_a_module_with_other_parameters_is_told_which(tmp_path):
    path = saved(tmp_path, Wider())
    with pytest.raises(RuntimeError, match=r"(?s)does not fit the module.*Unexpected.*extra.weight.*size mismatch"):
        engine().fit(Regression(), rows(), ckpt_path=path)
    path = saved(tmp_path)
    with pytest.raises(RuntimeError, match=r"Missing key.*extra.weight"):
        engine().fit(Wider(), rows(), ckpt_path=path)


class WithAdam(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class HalfTrained(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(self.parameters())[:2], lr=0.1)


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has the state of SGD, but configure_optimizers gives Adam"):
        engine().fit(WithAdam(), rows(), ckpt_path=saved(tmp_path))


def test_an_optimizer_of_other_parameters_is_told_which(tmp_path):
    message = r"for other parameters in group 0: missing \[\], unexpected \['net.2.bias', 'net.2.weight'\]"
    with pytest.raises(CheckpointError, match=message):
        engine().fit(HalfTrained(), rows(), ckpt_path=saved(tmp_path))


def test_a_path_that_is_no_checkpoint(tmp_path):
    (tmp_path / "else").mkdir()
    with pytest.raises(CheckpointError, match=f"else is no checkpoint: it has no {MANIFEST}"):
        engine().fit(Regression(), rows(), ckpt_path=tmp_path / "else")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        engine().fit(Regression(), rows(), ckpt_path=tmp_path / "nowhere")


def test_a_newer_format(tmp_path):
    path = saved(tmp_path, checkpoint_format="directory")
    content = json.loads((path / MANIFEST).read_text())
    del content["crc32"]
    content["format"] = 99
    content["versions"]["polyphase"] = "9.1"
    (path / MANIFEST).write_text(json.dumps({**content, "crc32": _crc_of(content)}))
    with pytest.raises(CheckpointError, match=r"format 99, .* formats up to 2: install Polyphase 9.1 or newer"):
        engine().fit(Regression(), rows(), ckpt_path=path)


@pytest.mark.parametrize("form", ["file", "directory"])
def test_nothing_is_changed_by_a_damaged_one(tmp_path, form):
    trained = Regression()
    path, module = saved(tmp_path, trained, checkpoint_format=form), Regression()
    damaged = path if form == "file" else next(path.glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[content.find(trained.net[0].weight.detach().numpy().tobytes()) if form == "file" else middle] ^= 1
    damaged.write_bytes(content)
    before = state(module)
    name = r"archive/data/\d+" if form == "file" else damaged.name
    with pytest.raises(CheckpointError, match=f"{path} is damaged.*{name} was changed"):
        engine().fit(module, rows(), ckpt_path=path)
    assert state(module) == before


def test_a_file_that_is_cut_off(tmp_path):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{path} is damaged: it is truncated"):
        engine().fit(Regression(), rows(), ckpt_path=path)


class Opaque:
    """No plain value."""


class WithOpaque(Regression):
    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:Attribute 'thing' is an instance")
def test_what_is_no_plain_value_is_said_when_it_is_saved_and_refused_when_it_is_opened(tmp_path):
    with pytest.warns(UserWarning, match="open with weights_only=False only"):
        path = saved(tmp_path, WithOpaque(Opaque()))
    with pytest.raises(CheckpointError, match=r"Opaque.*If you trust it, pass weights_only=False"):
        engine(max_epochs=2).fit(WithOpaque(), rows(), ckpt_path=path)
    engine(max_epochs=2).fit(WithOpaque(), rows(), ckpt_path=path, weights_only=False)


# --- every way in and out


@pytest.mark.parametrize("map_location", [None, "cpu", {"cpu": "cpu"}], ids=str)
def test_load_from_checkpoint(tmp_path, map_location):
    module = Regression()
    path = saved(tmp_path, module)
    assert state(Regression.load_from_checkpoint(path, map_location=map_location)) == state(module)


class Looks(Regression):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        type(self).seen = set(checkpoint)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_hooks_of_load_from_checkpoint_see_lightnings_entries_alone(kind, tmp_path):
    trainer = engine(checkpoint_format=kind)
    trainer.fit(Looks(), rows())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    Looks.load_from_checkpoint(tmp_path / "x.ckpt")
    assert "state_dict" in Looks.seen
    assert "polyphase" not in Looks.seen


class Evaluated(Regression):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = state(self)

    validation_step = test_step


@pytest.mark.parametrize("which", ["best", "last", "path"])
def test_evaluation_of_a_checkpoint(tmp_path, which):
    keeps = ModelCheckpoint(tmp_path, save_last=True, filename="best", save_top_k=1)
    run = engine(callbacks=[keeps], enable_checkpointing=True, num_sanity_val_steps=0)
    trained = Evaluated()
    run.fit(trained, rows(), rows())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
    other = Evaluated()
    run.test(other, rows(), ckpt_path=tmp_path / "best.ckpt" if which == "path" else which)
    assert other.seen == state(trained)


def test_the_best_one_is_removed_only_when_its_successor_is_there(tmp_path):
    class Falls(Regression):
        def training_step(self, batch, batch_idx):
            self.log("falls", -float(self.global_step))
            return super().training_step(batch, batch_idx)

    keeps = ModelCheckpoint(tmp_path, monitor="falls", save_top_k=1, every_n_train_steps=1)
    engine(callbacks=[keeps], enable_checkpointing=True).fit(Falls(), rows(40))
    ((path, manifest),) = find(tmp_path)
    assert path == keeps.best_model_path
    assert manifest.step == 10


def test_a_checkpoint_io_of_the_users_writes_what_it_always_wrote(tmp_path):
    run = engine(plugins=[TorchCheckpointIO()])
    run.fit(Regression(), rows())
    run.save_checkpoint(tmp_path / "file.ckpt")
    assert (tmp_path / "file.ckpt").is_file()
    again = engine(max_epochs=2)
    again.fit(Regression(), rows(), ckpt_path=tmp_path / "file.ckpt")
    assert again.global_step == 8


def test_storage_options_are_for_a_checkpoint_io(tmp_path):
    run = engine()
    run.fit(Regression(), rows())
    with pytest.raises(TypeError, match="Please implement your custom `CheckpointIO`"):
        run.save_checkpoint(tmp_path / "x", storage_options={})
    run = engine(checkpoint_format="directory")
    run.fit(Regression(), rows())
    with pytest.raises(TypeError, match="for a `CheckpointIO` of your own"):
        run.save_checkpoint(tmp_path / "x", storage_options={})


def test_weights_only(tmp_path):
    run = engine()
    run.fit(Regression(), rows())
    run.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert "optimizer_states" not in load_checkpoint(tmp_path / "weights")
    with pytest.raises(KeyError, match="contains only the model"):
        engine(max_epochs=2).fit(Regression(), rows(), ckpt_path=tmp_path / "weights")


@pytest.mark.parametrize("first", ["Trainer", "Engine"])
def test_the_loss_scale_goes_on(tmp_path, first):
    # Trainer refuses 16-mixed on the CPU, so its file is made by a CheckpointIO.
    plugins = [TorchCheckpointIO()] if first == "Trainer" else []
    run = engine(precision="16-mixed", plugins=plugins)
    run.fit(Regression(), rows())
    run.precision_plugin.scaler.update(123.0)  # type: ignore[attr-defined]
    run.save_checkpoint(tmp_path / "saved")
    again = engine(precision="16-mixed", max_epochs=2, limit_train_batches=0)
    again.fit(Regression(), rows(), ckpt_path=tmp_path / "saved")
    assert again.precision_plugin.scaler.get_scale() == 123.0  # type: ignore[attr-defined]


def test_a_requeued_slurm_job_saves_between_two_steps_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path / 'called'}\n")
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class Requeue(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    flags = {"default_root_dir": tmp_path, "plugins": [SLURMEnvironment(auto_requeue=True)]}
    engine(callbacks=[Requeue()], **flags).fit(Regression(), rows())
    assert (tmp_path / "called").read_text() == "requeue 77\n"
    assert load_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 3
    again = engine(**flags)
    again.fit(Regression(), rows())
    assert again.global_step == 4


# --- data without an order


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_goes_on_in_mid_epoch(tmp_path, num_workers):
    class Saves(Callback):
        def on_train_step_end(self, trainer: Any, module: LightningModule, save_now: bool) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "saved")

    def stream() -> DataLoader:
        return DataLoader(Stream(10), batch_size=2, num_workers=num_workers)

    engine(callbacks=[Saves()]).fit(Seen(), stream())
    module = Seen()
    module.epochs.append([])  # the epoch began in the other run
    engine(max_epochs=2).fit(module, stream(), ckpt_path=tmp_path / "saved")
    assert module.epochs[0] == [[4, 5], [6, 7], [8, 9]]
    assert module.epochs[-1] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_stream_of_other_ranks_is_refused():
    data_position = engine()._data_connector.data_position
    loaders = [{"unit": "stateful", "state": {}}]
    data_position.load_state_dict(
        [{"batches": 0, "micro_batch_size": None, "sample_seed": None, "loaders": loaders}] * 2
    )
    with pytest.raises(ValueError, match=r"positions of 2 rank\(s\) in an IterableDataset .* which 1 can't share"):
        data_position.resume(DataLoader([1]))


class Saves(Callback):
    """After each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer: Any, module: LightningModule, save_now: bool) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}")


def test_a_loader_without_an_order_can_not_go_on_in_one(tmp_path):
    engine(callbacks=[Saves(tmp_path)]).fit(Seen(), DataLoader(Positions(8), batch_size=2))
    assert is_checkpoint(tmp_path / "2")
    with pytest.raises(ValueError, match="has no order of samples that could be continued"):
        engine().fit(Seen(), [[1], [2], [3], [4]], ckpt_path=tmp_path / "2")


def test_the_checkpoint_says_which_run_was_trained_on_what(tmp_path, capsys):
    for batch_size, resumed in ((3, None), (2, tmp_path / "2")):
        loader = rows(20, batch_size=batch_size, shuffle=True)
        engine(callbacks=[Saves(tmp_path)]).fit(Regression(), loader, ckpt_path=resumed)
    capsys.readouterr()
    assert commands.main(["inspect", str(tmp_path / "5")]) == 0
    assert "12 of 20 samples of epoch 0 (0 to 6 by 1, 6 to 12 by 1 rank(s))" in capsys.readouterr().out
