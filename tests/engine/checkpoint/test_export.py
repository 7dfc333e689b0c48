"""What is exported is what stock Lightning would have written, and goes on in its Trainer; or the weights alone."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, load_checkpoint
from polyphase.engine.checkpoint.export import configuration_of, export
from tests.memory import Peak

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


@pytest.mark.parametrize("name", ["ours", "ours.ckpt"])
def test_the_average_or_the_weights_that_training_goes_on_from(tmp_path, name):
    run(Engine, tmp_path / "run", SavesIn("on_train_batch_end", 6, tmp_path / name))
    saved = load_checkpoint(tmp_path / name)
    assert not same(dict(saved["current_model_state"]), dict(saved["state_dict"]))
    for weights, key in ((None, "state_dict"), ("average", "state_dict"), ("current", "current_model_state")):
        export(str(tmp_path / name), str(tmp_path / "x.safetensors"), weights=weights, overwrite=True)
        assert same(load_file(tmp_path / "x.safetensors"), dict(saved[key]))
    export(str(tmp_path / name), str(tmp_path / "head"), huggingface="head", weights="current")
    assert same(load_file(tmp_path / "head" / "model.safetensors")["bias"], saved["current_model_state"]["head.bias"])
    with pytest.raises(ValueError, match=r"a \.ckpt file gets all that is in .*: leave out weights='average'"):
        export(str(tmp_path / name), str(tmp_path / "x.ckpt"), weights="average")


def test_without_an_average_the_current_weights_are_all_there_are(tmp_path):
    path, to = save(tmp_path / "x"), str(tmp_path / "x.safetensors")
    export(path, to, weights="current")
    assert same(load_file(to), content(1)["state_dict"])
    with pytest.raises(ValueError, match="x has no average of weights: checkpoints of a run with WeightAveraging or"):
        export(path, to, weights="average", overwrite=True)


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


MADE_UP = [[{}], [{"state": 1, "param_groups": [{"params": [[]]}]}], [{"state": {}, "param_groups": 3}]]


@pytest.mark.parametrize("states", [None, *MADE_UP], ids=str)
def test_a_file_of_lightnings_is_opened_as_it_is(tmp_path, states):
    """Whatever it has in place of the state of optimizers."""
    trainer = trainer_of(pl.Trainer, tmp_path, max_steps=1)
    trainer.fit(Small(), rows(), rows(2))
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    if states is not None:
        torch.save({**torch.load(tmp_path / "stock.ckpt"), "optimizer_states": states}, tmp_path / "stock.ckpt")
    stock = torch.load(tmp_path / "stock.ckpt")
    export(str(tmp_path / "stock.ckpt"), str(tmp_path / "out.ckpt"))
    for opened in (load_checkpoint(tmp_path / "stock.ckpt"), torch.load(tmp_path / "out.ckpt")):
        assert same({key: opened[key] for key in stock}, stock)


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
    with pytest.raises(CheckpointError, match="x has no weights: it has global_step"):
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


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single process reads


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """What torch's reader of Hugging Face's layout finds."""
    reader = HuggingFaceStorageReader(str(folder))
    about = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in about.items()}
    dcp.load(state, storage_reader=reader)
    return state


@ALONE
def test_a_sub_module_is_written_in_files_with_an_index(tmp_path):
    weights = {f"model.{i}": torch.full((2, 3), float(i)) for i in range(4)} | {"model.half": torch.ones(3).half()}
    path = save(tmp_path / "x", state_dict={**weights, "loss.weight": torch.ones(1), "model.extra": {"a": 1}})
    left_out = export(path, str(tmp_path / "all"), huggingface="model")
    assert left_out == ["model.extra"]
    assert os.listdir(tmp_path / "all") == ["model.safetensors"]
    export(path, f"{tmp_path}/parts/", huggingface="model", shard_bytes=50, configuration={"config.json": "{}"})
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "parts")) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 24 + 6}
    assert index["weight_map"]["2"] == names[1]
    expected = {name.removeprefix("model."): weight for name, weight in weights.items()}
    for folder in ("all", "parts"):
        assert same(read_by_torch(tmp_path / folder), expected)
    with safetensors.safe_open(tmp_path / "parts" / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers opens no other"


@ALONE
def test_the_layout_of_a_file_of_lightnings_and_of_the_whole_module(tmp_path):
    state = {"w": torch.arange(6.0), "part": torch.zeros(())}
    state["view"] = state["w"][2:4]
    torch.save({"state_dict": state, "epoch": 0, "global_step": 0}, tmp_path / "x.ckpt")
    export(str(tmp_path / "x.ckpt"), str(tmp_path / "out"), huggingface="")
    assert same(read_by_torch(tmp_path / "out"), state)


def test_folders_that_can_not_be_written(tmp_path):
    path = save(tmp_path / "x")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="mine is there already: give the name of a new folder"):
        export(path, f"{tmp_path}/mine", huggingface="net", overwrite=True)
    with pytest.raises(ValueError, match="is a URL: the folder for from_pretrained must be local"):
        export(path, "memory://x/out", huggingface="net")
    with pytest.raises(ValueError, match=r"no weights of .*x are below 'model': they are below net"):
        export(path, f"{tmp_path}/out", huggingface="model")
    path = save(tmp_path / "y", state_dict={"net.w": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"no torch\.complex128, the dtype of net\.w: export to \.pt or \.ckpt"):
        export(path, f"{tmp_path}/out.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["mine", "x", "y"]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_one_tensor_at_a_time_is_in_memory(tmp_path, kind):
    largest = 1 << 24
    weights = {f"net.{i}": torch.full((largest // 4,), float(i)) for i in range(12)}
    path = str(tmp_path / "x")
    if kind == "directory":
        save(path, state_dict=weights)
    else:
        torch.save({"state_dict": weights, "epoch": 0, "global_step": 0}, path)
    del weights
    gc.collect()
    for to, layout in ((tmp_path / "one.safetensors", None), (tmp_path / "out", "net")):
        with Peak() as peak:
            export(path, str(to), huggingface=layout)
        assert peak.bytes < 1.5 * largest, peak.bytes / largest  # half a tensor for the interpreter's own


class Settings(dict):
    """As the configurations of transformers are written."""

    def to_json_string(self) -> str:
        return json.dumps(self)


class OfItsOwn(torch.nn.Linear):
    """The class of a model."""


def test_the_configuration_is_that_of_the_model_as_it_is():
    model = OfItsOwn(2, 2).bfloat16()
    assert configuration_of(model) == {}
    model.config, model.generation_config = Settings(dtype="float32", width=2), Settings(bos_token_id=0)
    # As `fully_shard` changes it.
    model.__class__ = type("FSDPOfItsOwn", (OfItsOwn,), {"__module__": "torch.distributed.fsdp"})
    files = {name: json.loads(text) for name, text in configuration_of(model).items()}
    assert files["generation_config.json"] == {"bos_token_id": 0}
    assert files["config.json"] == {"dtype": "bfloat16", "width": 2, "architectures": ["OfItsOwn"]}
