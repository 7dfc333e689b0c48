"""How trainers are made and handed around: from signatures, configurations, command lines and pickles."""

import dataclasses
import importlib
import inspect
import multiprocessing
import pickle
import sys

import cloudpickle
import hydra.utils
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .small import Small, SmallData


def test_flags_are_filtered_by_the_signature(trainer_class, tmp_path):
    """As pytorch_tabular does: what the constructor does not name is dropped."""
    wanted = {"max_epochs": 2, "limit_val_batches": 1, "accelerator": "cpu", "no_flag_of_any": 3, "logger": False}
    named = inspect.signature(trainer_class.__init__).parameters
    trainer = trainer_class(**{k: v for k, v in wanted.items() if k in named}, default_root_dir=tmp_path)
    assert (trainer.max_epochs, trainer.limit_val_batches) == (2, 1)
    assert set(inspect.signature(Trainer.__init__).parameters) <= set(named)


def test_flags_of_a_dataclass(trainer_class, tmp_path):
    @dataclasses.dataclass
    class Flags:
        max_epochs: int = 2
        accelerator: str = "cpu"
        logger: bool = False
        default_root_dir: str = str(tmp_path)

    assert trainer_class(**dataclasses.asdict(Flags())).max_epochs == 2


def test_a_target_by_its_path(trainer_class, tmp_path):
    """As Hydra's `instantiate` does."""
    config = {
        "_target_": f"{trainer_class.__module__}.{trainer_class.__qualname__}",
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "callbacks": [EarlyStopping("val_loss")],
        "default_root_dir": str(tmp_path),
    }
    module, _, name = config.pop("_target_").rpartition(".")
    trainer = getattr(importlib.import_module(module), name)(**config)
    trainer.fit(Small())
    assert trainer.global_step == 6


def test_hydra(trainer_class, tmp_path):
    target = f"{trainer_class.__module__}.{trainer_class.__qualname__}"
    stopping = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss"}
    config = {"_target_": target, "max_epochs": 1, "accelerator": "cpu", "callbacks": [stopping], "logger": False}
    trainer = hydra.utils.instantiate(config, default_root_dir=str(tmp_path))
    assert isinstance(trainer.callbacks[0], EarlyStopping)


def test_positional_and_default_arguments(trainer_class):
    assert isinstance(trainer_class(), Trainer)


def test_defaults_by_a_class_of_ones_own(trainer_class, tmp_path):
    class Mine(trainer_class):
        def __init__(self, **flags):
            flags.setdefault("max_epochs", 1)
            super().__init__(**flags, accelerator="cpu", logger=False, default_root_dir=tmp_path)

    assert Mine().max_epochs == 1


def test_defaults_by_the_environment(trainer_class, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    assert trainer_class().max_epochs == 7


def test_the_command_line(trainer_class, tmp_path, monkeypatch):
    arguments = ["fit", "--trainer.max_epochs=1", "--model.width=3", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}", "--data.batch_size=8"]
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    cli = LightningCLI(Small, SmallData, trainer_class=trainer_class, save_config_callback=None)
    assert (cli.trainer.global_step, cli.model.hparams.width) == (3, 3)


def test_a_command_line_with_a_configuration_and_defaults(trainer_class, tmp_path, monkeypatch):
    (tmp_path / "flags.yaml").write_text(
        "trainer:\n  max_epochs: 1\n  callbacks:\n  - class_path: EarlyStopping\n"
        "    init_args:\n      monitor: val_loss\n"
    )
    monkeypatch.setattr(sys, "argv", ["script.py", "fit", "--config", str(tmp_path / "flags.yaml")])
    defaults = {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path)}
    cli = LightningCLI(Small, SmallData, trainer_class=trainer_class, trainer_defaults=defaults)
    assert cli.trainer.early_stopping_callback is not None


def test_a_subclass_of_the_command_line(trainer_class, tmp_path, monkeypatch):
    seen = []

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.batch_size", "model.width")
            parser.set_defaults({"trainer.max_epochs": 1, "trainer.logger": False, "trainer.accelerator": "cpu"})

        def before_fit(self):
            seen.append("before")

        def after_fit(self):
            seen.append((self.trainer.global_step, self.model.hparams.width))

    monkeypatch.setattr(
        sys, "argv", ["script.py", "fit", "--data.batch_size=6", f"--trainer.default_root_dir={tmp_path}"]
    )
    CLI(Small, SmallData, trainer_class=trainer_class, save_config_callback=None)
    assert seen == ["before", (4, 6)]


def test_a_parser_of_ones_own(trainer_class):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(trainer_class, "trainer")
    found = parser.parse_args(["--trainer.max_epochs=4", "--trainer.precision=bf16-mixed"])
    assert (found.trainer.max_epochs, found.trainer.precision) == (4, "bf16-mixed")


@pytest.mark.parametrize("how", [pickle, cloudpickle], ids=lambda module: module.__name__)
@pytest.mark.parametrize("after_fit", [False, True])
def test_pickles(make, how, after_fit):
    dump = how.dumps
    trainer = make(max_epochs=1)
    if after_fit:
        trainer.fit(Small())
    again = pickle.loads(dump(trainer))  # noqa: S301 (what this very test has dumped)
    assert (again.max_epochs, again.global_step) == (1, 6 * after_fit)


def _fits(trainer, queue):
    trainer.fit(Small())
    queue.put(trainer.global_step)


def test_a_trainer_goes_to_another_process(make):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_fits, args=(make(max_epochs=1), queue))
    process.start()
    assert queue.get(timeout=60) == 6
    process.join(10)


def test_many_in_one_process(make):
    for width in (2, 3, 4):
        trainer = make(max_epochs=1)
        trainer.fit(Small(width))
        assert trainer.global_step == 6


@pytest.mark.parametrize(
    "flags",
    [
        {"accelerator": "no such thing"},
        {"devices": 0},
        {"precision": "17-mixed"},
        {"max_epochs": 1, "fast_dev_run": -1},
        {"limit_train_batches": 1.5},
        {"no_such_flag": 1},
        {"gradient_clip_algorithm": "sum"},
        {"strategy": "no such strategy"},
    ],
    ids=str,
)
def test_wrong_flags(make, flags):
    with pytest.raises((TypeError, ValueError, MisconfigurationException)):
        make(**flags)
