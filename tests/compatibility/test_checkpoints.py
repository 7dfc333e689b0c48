"""What other code does with checkpoints."""

import io
import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from polyphase.engine import Engine

from .small import Small, SmallData


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.fixture
def trained(make, tmp_path):
    """A trainer after one epoch, its module, and the file that it has saved."""
    seed_everything(0)
    trainer, module = make(max_epochs=1), Small()
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return trainer, module, tmp_path / "saved.ckpt"


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_load(trained, weights_only):
    _, module, path = trained
    content = torch.load(path, weights_only=weights_only)
    assert torch.equal(content["state_dict"]["net.0.weight"], module.net[0].weight)
    assert (content["epoch"], content["global_step"]) == (1, 6)
    assert content["hyper_parameters"] == {"width": 4, "lr": 0.1}
    assert len(content["optimizer_states"]) == len(content["lr_schedulers"]) == 1


def test_from_a_stream(trained):
    _, module, path = trained
    with open(path, "rb") as stream:
        content = torch.load(io.BytesIO(stream.read()), weights_only=True)
    module.load_state_dict(content["state_dict"])


def test_load_from_checkpoint(trained):
    _, module, path = trained
    assert torch.equal(weights(Small.load_from_checkpoint(path)), weights(module))
    assert Small.load_from_checkpoint(path, lr=0.5).lr == 0.5


@pytest.fixture
def lacking(trained):
    """A file without one of the module's parameters."""
    path = trained[2]
    content = torch.load(path, weights_only=True)
    del content["state_dict"]["net.2.bias"]
    torch.save(content, path)
    return path


def test_load_from_checkpoint_that_is_not_strict(lacking):
    with pytest.raises(RuntimeError, match=r"net\.2\.bias"):
        Small.load_from_checkpoint(lacking)
    Small.load_from_checkpoint(lacking, strict=False)


def test_strict_loading_of_the_module(lacking, make):
    module = Small()
    module.strict_loading = False
    make().validate(module, ckpt_path=lacking, verbose=False)


def test_it_is_a_file_that_can_be_moved_and_removed(trained, make):
    path = trained[2]
    assert path.is_file()
    assert os.path.getsize(path) > 1000
    shutil.copyfile(path, path.with_name("copy.ckpt"))
    os.remove(path)
    make(max_epochs=2).fit(module := Small(), ckpt_path=path.with_name("copy.ckpt"))
    assert len(module.losses) == 6


@pytest.mark.parametrize("other", [Trainer, Engine])
def test_a_run_goes_on_with_another_trainer(trained, other, tmp_path):
    _, module, path = trained
    trainer = other(accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(again := Small(), ckpt_path=path)
    assert (trainer.global_step, trainer.current_epoch, len(again.losses)) == (12, 2, 6)
    assert not torch.equal(weights(module), weights(again))


def test_keys_of_hooks_and_callbacks(make, tmp_path):
    class Keeps(Callback):
        def state_dict(self):
            return {"mine": 1}

        def load_state_dict(self, state):
            self.loaded = state

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["of the callback"] = 2

        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            self.seen = checkpoint["of the callback"]

    class Hooked(Small):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["of the module"] = {"a": torch.ones(2)}

        def on_load_checkpoint(self, checkpoint):
            self.seen = checkpoint["of the module"]

    trainer = make(max_epochs=1, callbacks=[Keeps()])
    trainer.fit(Hooked())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    keeps, module = Keeps(), Hooked()
    make(max_epochs=2, callbacks=[keeps]).fit(module, ckpt_path=tmp_path / "x.ckpt")
    assert (keeps.loaded, keeps.seen) == ({"mine": 1}, 2)
    assert torch.equal(module.seen["a"], torch.ones(2))


def test_a_data_module_keeps_its_state(make, tmp_path):
    trainer = make(max_epochs=1)
    trainer.fit(Small(), datamodule=SmallData())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    data = SmallData()
    make(max_epochs=2).fit(Small(), datamodule=data, ckpt_path=tmp_path / "x.ckpt")
    assert data.loaded == {"stages": ["fit"]}
    assert SmallData.load_from_checkpoint(tmp_path / "x.ckpt").batch_size == 4


def test_weights_only_checkpoints(make, tmp_path):
    trainer = make(max_epochs=1)
    trainer.fit(Small())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert "optimizer_states" not in content
    Small.load_from_checkpoint(tmp_path / "x.ckpt")


def test_names_top_k_and_last(make, tmp_path):
    best = ModelCheckpoint(tmp_path, "{epoch}-{step}-{val_loss:.1f}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make(max_epochs=4, callbacks=[best])
    trainer.fit(Small())
    names = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert len(names) == 3
    assert "last.ckpt" in names
    assert Path(best.best_model_path).name in names
    assert Path(best.last_model_path).name == "last.ckpt"
    assert len(best.best_k_models) == 2
    assert float(best.best_model_score) == pytest.approx(float(min(best.best_k_models.values())))


def test_last_as_a_link(make, tmp_path):
    make(max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, save_last="link")]).fit(Small())
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").resolve().name == "epoch=1-step=12.ckpt"
    Small.load_from_checkpoint(tmp_path / "last.ckpt")


def test_a_second_run_in_the_folder_counts_versions(make, tmp_path):
    for _ in range(2):
        make(max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, "model")]).fit(Small())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["model-v1.ckpt", "model.ckpt"]


def test_every_n_steps(make, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    make(max_epochs=2, callbacks=[saves]).fit(Small())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]


def test_by_time(make, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", train_time_interval=timedelta(0), save_top_k=-1)
    make(max_steps=3, callbacks=[saves]).fit(Small())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_files_are_there_when_the_next_hook_looks(make, tmp_path):
    seen = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            path = trainer.checkpoint_callback.best_model_path
            seen.append(os.path.isfile(path) and torch.load(path, weights_only=True)["epoch"])

    make(max_epochs=3, callbacks=[Looks(), ModelCheckpoint(tmp_path, monitor="train_loss", mode="max")]).fit(Small())
    assert seen[0] is False
    assert all(type(epoch) is int for epoch in seen[1:])


def test_a_subclass_that_saves_something_beside(make, tmp_path):
    class Copies(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            shutil.copyfile(filepath, f"{filepath}.copy")

        def _remove_checkpoint(self, trainer, filepath):
            super()._remove_checkpoint(trainer, filepath)
            os.remove(f"{filepath}.copy")

    make(max_epochs=3, callbacks=[Copies(tmp_path)]).fit(Small())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2-step=18.ckpt", "epoch=2-step=18.ckpt.copy"]


def test_a_report_that_saves_copies_and_clears(make, tmp_path):
    """As Ray Train's."""

    class Reports(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            folder = tmp_path / "temporary"
            trainer.save_checkpoint(folder / "checkpoint.ckpt")
            shutil.copytree(folder, tmp_path / f"kept-{trainer.current_epoch}")
            shutil.rmtree(folder)

    make(max_epochs=2, callbacks=[Reports()], enable_checkpointing=False).fit(Small())
    for epoch in (0, 1):
        Small.load_from_checkpoint(tmp_path / f"kept-{epoch}" / "checkpoint.ckpt")


def test_after_an_exception(make, tmp_path):
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise KeyError("no")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError):
        make(callbacks=[OnExceptionCheckpoint(tmp_path, "failed")], max_epochs=1).fit(Fails())
    assert torch.load(tmp_path / "failed.ckpt", weights_only=True)["global_step"] == 3


def test_a_checkpoint_io_of_ones_own(make, tmp_path):
    calls = []

    class Notes(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            calls.append(("save", storage_options))
            super().save_checkpoint(checkpoint, path)

        def load_checkpoint(self, path, *arguments, **named):
            calls.append(("load", None))
            return super().load_checkpoint(path, *arguments, **named)

        def remove_checkpoint(self, path):
            calls.append(("remove", None))
            super().remove_checkpoint(path)

    trainer = make(max_epochs=2, plugins=[Notes()], callbacks=[ModelCheckpoint(tmp_path)])
    trainer.fit(Small())
    trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})
    make(max_epochs=3, plugins=[Notes()], enable_checkpointing=False).fit(Small(), ckpt_path=tmp_path / "x.ckpt")
    assert calls == [("save", None), ("save", None), ("remove", None), ("save", {"a": 1}), ("load", None)]


def test_asynchronous_io(make, tmp_path):
    make(max_epochs=2, plugins=[AsyncCheckpointIO()], callbacks=[ModelCheckpoint(tmp_path, save_top_k=-1)]).fit(Small())
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    for path in tmp_path.glob("*.ckpt"):
        Small.load_from_checkpoint(path)


def test_a_strategy_that_saves_in_its_own_way(make, tmp_path):
    saved = []

    class Mine(SingleDeviceStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            saved.append(sorted(checkpoint["state_dict"]))
            super().save_checkpoint(checkpoint, filepath, storage_options)

    trainer = make(max_epochs=1, strategy=Mine(device="cpu"))
    trainer.fit(Small())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert len(saved) == 2  # one by ModelCheckpoint
    Small.load_from_checkpoint(tmp_path / "x.ckpt")


def test_a_strategy_whose_load_is_wrapped(trained, make):
    """As pytorch-forecasting does, for checkpoints with classes of its own."""
    path, calls = trained[2], []
    trainer = make(max_epochs=2)
    load = trainer.strategy.load_checkpoint

    def wrapped(path, *arguments, **named):
        calls.append(path)
        return load(path, *arguments, **named)

    trainer.strategy.load_checkpoint = wrapped
    trainer.fit(Small(), ckpt_path=path)
    assert len(calls) == 1


class Options:
    """Of somebody's: no plain value."""

    size = 3


class WithOptions(Small):
    def __init__(self, options=None):
        super().__init__()
        self.save_hyperparameters()


def test_objects_among_the_hyperparameters(make, tmp_path):
    trainer = make(max_epochs=1)
    trainer.fit(WithOptions(Options()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")  # the engine warns that they are no plain values
    assert WithOptions.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).hparams.options.size == 3
    make(max_epochs=2).fit(WithOptions(Options()), ckpt_path=tmp_path / "x.ckpt", weights_only=False)


def test_the_variable_that_has_torch_load_all(make, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trainer = make(max_epochs=1)
    trainer.fit(WithOptions(Options()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    make(max_epochs=2).fit(WithOptions(Options()), ckpt_path=tmp_path / "x.ckpt")
    assert WithOptions.load_from_checkpoint(tmp_path / "x.ckpt").hparams.options.size == 3


@pytest.mark.parametrize("ckpt_path", ["best", "last"])
def test_best_and_last(make, tmp_path, ckpt_path):
    trainer = make(max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)])
    trainer.fit(module := Small())
    (results,) = trainer.validate(module, ckpt_path=ckpt_path, verbose=False)
    assert results["val_loss"] > 0
    assert Path(trainer.ckpt_path).suffix == ".ckpt"


def test_a_checkpoint_callback_of_another_kind(make, tmp_path):
    class Mine(Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    make(max_epochs=2, callbacks=[Mine()]).fit(Small())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["0.ckpt", "1.ckpt"]


def test_dump_and_restore_by_the_connector(make):
    trainer = make(max_epochs=1, enable_checkpointing=False)
    trainer.fit(module := Small())
    dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert torch.equal(dumped["state_dict"]["net.0.weight"], module.net[0].weight)


def test_a_missing_checkpoint(make, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        make(max_epochs=1).fit(Small(), ckpt_path=tmp_path / "missing.ckpt")


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_run_says_how_its_checkpoint_is_read(trained, make, weights_only):
    path = trained[2]
    make(max_epochs=3).fit(Small(), ckpt_path=path, weights_only=weights_only)
    make().validate(Small(), ckpt_path=path, weights_only=weights_only, verbose=False)


def test_warnings_as_errors(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Lightning's, with both.
        warnings.filterwarnings("ignore", message=".*LeafSpec|.*does not have many workers|Converting a tensor")
        make(max_epochs=1, callbacks=[ModelCheckpoint(tmp_path)]).fit(Small())
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_saved_on_an_exception(make, tmp_path):
    class Breaks(Small):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError, match="broken"):
        make(max_epochs=1, callbacks=[callback]).fit(Breaks())
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 3
