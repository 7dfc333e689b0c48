"""What is said about each wrong argument of the engine, before anything is built; and that nothing right is refused."""

import datetime
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.engine import Engine, fit
from polyphase.engine.checks import ArgumentError, check_arguments
from polyphase.engine.errors import RefusedError
from polyphase.engine.precision import PRECISIONS

from .tiny import QUIET, Seen, engine, rows

BATCHES = "a fraction from 0.0 to 1.0, a whole number of batches"
TIME = "a time as 'DD:HH:MM:SS', a timedelta or a dictionary of its arguments"


# --- names


def test_a_name_that_there_is_not():
    message = r"^Engine\.__init__\(\) got an unexpected keyword argument 'stratgy'\. Did you mean 'strategy'\?$"
    for build in (lambda: Engine(stratgy="ddp"), lambda: fit(Seen(), rows(), stratgy="ddp")):
        with pytest.raises(TypeError, match=message) as refused:
            build()
        assert isinstance(refused.value, (ArgumentError, RefusedError))


def test_several_names_are_said_one_a_line():
    with pytest.raises(ArgumentError) as refused:
        Engine(gpus=2, max_epoch=3)
    assert str(refused.value).splitlines() == [
        "Engine.__init__() got an unexpected keyword argument 'gpus'. Did you mean 'devices'?",
        "Engine.__init__() got an unexpected keyword argument 'max_epoch'. Did you mean 'max_epochs'?",
    ]


def test_arguments_by_position_are_answered_with_an_example():
    with pytest.raises(TypeError) as refused:
        Engine("ddp", 2)
    message = "Engine takes its arguments by name, but got 'ddp', 2 without one: write Engine("
    assert str(refused.value) == f'{message}strategy="ddp", devices=2).'


def test_a_class_of_the_users_is_called_by_its_name():
    class Mine(Engine): ...

    with pytest.raises(TypeError, match=r"^Mine\.__init__\(\) got an unexpected keyword argument 'stratgy'"):
        Mine(stratgy="ddp")


def test_a_variable_of_the_environment_is_checked_as_well(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "three")
    with pytest.raises(ArgumentError, match=r"^max_epochs='three': a whole number"):
        Engine()
    assert Engine(**QUIET, max_epochs=1).max_epochs == 1


# --- values


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("devices", "two", "devices='two': a number, 'auto' or a list of indices."),
        ("devices", None, "devices=None: a number, 'auto' or a list of indices."),
        ("devices", 2**31, "devices=2147483648: a number, 'auto' or a list of indices."),
        ("devices", [0.5], "devices=[0.5]: a number, 'auto' or a list of indices."),
        ("accelerator", [0], "accelerator=[0]: a name such as 'cpu' or 'gpu', or an Accelerator."),
        ("strategy", 3, "strategy=3: a name such as 'ddp' or 'hsdp:shard=4', or a Strategy."),
        ("compression", None, "compression=None: a name such as 'bf16' or 'powersgd:4'."),
        ("resume", [0], "resume=[0]: a path, 'auto' or None."),
        ("default_root_dir", 3, "default_root_dir=3: a path or None."),
        ("seed_samples", 2, "seed_samples=2: True or False."),
        ("callbacks", "x", "callbacks='x': a Callback, a list of them or None."),
        ("callbacks", [3], "callbacks=[3]: a Callback, a list of them or None."),
        ("logger", "csv", "logger='csv': a Logger, a list of them, True, False or None."),
        ("logger", CSVLogger, f"logger={CSVLogger}: a Logger, a list of them, True, False or None."),
        ("max_epochs", "three", "max_epochs='three': a whole number of at least -1 or None."),
        ("max_epochs", -2, "max_epochs must be a whole number of at least -1, but got -2."),
        ("max_epochs", 1e3, "max_epochs must be a whole number of at least -1, but got 1000.0."),
        ("max_steps", None, "max_steps=None: a whole number of at least -1."),
        ("max_steps", 1.5, "max_steps must be a whole number of at least -1, but got 1.5."),
        ("num_nodes", "two", "num_nodes='two': a whole number of at least 1."),
        (
            "accumulate_grad_batches",
            True,
            "accumulate_grad_batches must be a whole number of at least 1, but got T",
        ),
        ("check_val_every_n_epoch", 0, "check_val_every_n_epoch must be a whole number of at least 1, but got 0."),
        ("log_every_n_steps", "x", "log_every_n_steps='x': a whole number of at least 0 or None."),
        ("fast_dev_run", "yes", "fast_dev_run='yes': a whole number of at least 0, True or False."),
        ("global_batch_size", "8", "global_batch_size='8': a whole number of at least 1 or None."),
        (
            "micro_batch_size",
            "atuo",
            "micro_batch_size='atuo': a whole number of at least 1, 'auto' or None. Did",
        ),
        ("hang_timeout_s", "long", "hang_timeout_s='long': a number or None."),
        ("hang_timeout_s", 0, "hang_timeout_s must be greater than 0, but got 0."),
        ("gradient_clip_val", "big", "gradient_clip_val='big': a number or None."),
        ("gradient_clip_val", -1, "gradient_clip_val must be at least 0, but got -1."),
        ("limit_train_batches", "10%", f"limit_train_batches='10%': {BATCHES}, or None."),
        ("limit_val_batches", 1.5, f"limit_val_batches=1.5: {BATCHES}, or None."),
        ("overfit_batches", None, f"overfit_batches=None: {BATCHES}."),
        ("val_check_interval", "often", f"val_check_interval='often': {BATCHES}, {TIME}, or None."),
        ("max_time", "1h", f"max_time='1h': {TIME}, or None."),
        ("max_time", {"hour": 1}, f"max_time={{'hour': 1}}: {TIME}, or None."),
        (
            "precision",
            "bf16-mixd",
            "Precision 'bf16-mixd' is invalid. Did you mean 'bf16-mixed'? Allowed: 16-mixed",
        ),
        ("precision", [16], "Precision [16] is invalid. Allowed: 16-mixed, 16-true"),
        ("uneven", "padd", "unknown value of uneven 'padd'. Did you mean 'pad'? Allowed: drop, pad."),
        ("uneven", 1, "uneven=1: 'pad' or 'drop'."),
        (
            "nonfinite",
            "eror",
            "unknown value of nonfinite 'eror'. Did you mean 'error'? Allowed: error, ignore, skip, warn.",
        ),
        (
            "profiler",
            "simpel",
            "unknown value of profiler 'simpel'. Did you mean 'simple'? Allowed: advanced",
        ),
        ("gradient_clip_algorithm", "nrom", "unknown value of gradient_clip_algorithm 'nrom'. Did you mean 'norm'?"),
        ("compile", "fast", "compile='fast': True, False, 'default', 'reduce-overhead', 'max-autotune' or None."),
        ("deterministic", "wran", "deterministic='wran': True, False, 'warn' or None. Did you mean 'warn'?"),
        (
            "plugins",
            "x",
            "plugins='x': a Precision, a ClusterEnvironment, a CheckpointIO, a LayerSync, a list of",
        ),
        ("model_registry", 1, "model_registry=1: a name or None."),
        ("resume", list(range(1000)), "resume=[0, 1, 2, 3, 4, 5, ...]: a path, 'auto' or None."),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_a_wrong_value_is_said_in_a_line_with_what_it_can_be(name, value, message):
    with pytest.raises(ArgumentError) as refused:
        Engine(**{name: value})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"limit_val_batches": -0.1}, r"You have passed invalid value -0\.1 for limit_val_batches"),
        ({"check_val_every_n_epoch": 1.2}, "should be an integer"),
        ({"max_steps": -2}, "`max_steps` must be a non-negative integer or -1"),
        ({"gradient_clip_val": (1, 2)}, "`gradient_clip_val` should be an int or a float"),
        ({"gradient_clip_algorithm": "norm2"}, "`gradient_clip_algorithm` norm2 is invalid"),
        ({"profiler": "mine"}, "When passing string value for the `profiler` parameter of `Trainer`, it can only be"),
        ({"devices": 0, "accelerator": "tpu"}, "value is not a valid input using"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_lightnings_own_words_are_in_it(flags, words):
    for trainer in (Trainer, Engine):
        with pytest.raises((TypeError, ValueError, MisconfigurationException), match=words):
            trainer(**flags)


def test_the_error_is_of_the_kinds_that_people_catch():
    assert issubclass(ArgumentError, (TypeError, ValueError))
    for kind in (TypeError, ValueError, MisconfigurationException, RefusedError):
        with pytest.raises(kind, match="max_epochs"):
            Engine(max_epochs="three")


def test_the_cpu_has_no_indices():
    for devices in ([0, 1], "0,1"):
        with pytest.raises(ValueError, match=r"the CPU has no indices; a number of processes, or 'auto'\.$"):
            engine(devices=devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which this says there is not")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_without_a_gpu_it_is_said_what_torch_is_built_for_and_what_there_is(accelerator):
    with pytest.raises(MisconfigurationException) as refused:
        Engine(accelerator=accelerator)
    message = str(refused.value)
    in_lightnings_words = {"gpu": "No supported gpu backend found!", "cuda": "`CUDAAccelerator` can not run on your"}
    assert in_lightnings_words[accelerator] in message
    assert f"accelerator='{accelerator}': " in message
    assert f"torch {torch.__version__} is built for" in message
    assert "sees 0 GPUs" in message
    assert re.search(r'Available here: .*cpu.*\. Without a GPU: Engine\(accelerator="cpu"\)\.$', message)


def test_what_lightning_alone_knows_of_a_device_it_says_itself():
    with pytest.raises((MisconfigurationException, ModuleNotFoundError), match=r"XLA|xla"):
        Engine(accelerator="tpu")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_spawn", "hsdp+tp"])
def test_an_interactive_session_is_told_of_the_notebook_launcher(strategy, monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    name = strategy.removesuffix("_spawn")
    with pytest.raises(MisconfigurationException) as refused:
        engine(strategy=strategy, devices=4)
    said = f"`Engine(strategy='{strategy}')` is not compatible with an interactive environment"
    assert str(refused.value).startswith(said)
    assert f'Engine(strategy="{name}_notebook")' in str(refused.value)
    assert engine(strategy=f"{name}_notebook", devices=4).world_size == 4
    assert engine(strategy="single").world_size == 1


# --- what is right


class Registered(CPUAccelerator):
    """Reads `devices` in a way of its own."""

    @staticmethod
    def parse_devices(devices):
        return int(str(devices).removeprefix("cores:"))


class OfTheOtherPackage:
    """As `pytorch_lightning.Callback` is not a `lightning.pytorch.Callback`."""

    Callback = type("Callback", (), {})


class Alike:
    """Does as a logger without being a `Logger`."""

    name, version, log_metrics, log_hyperparams = "alike", 0, print, print


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("accelerator", value) for value in ("auto", "cpu", "gpu", "tpu", "someone's", CPUAccelerator())),
        *(
            ("devices", value)
            for value in ("auto", "0,1", "0,", "1", " 2 ", -1, "-1", 3, [0], (0, 1), [], 0, np.int64(2))
        ),
        *(("strategy", value) for value in ("ddp", "DDP", "deepspeed_stage_2", DDPStrategy())),
        *(("strategy", SingleDeviceStrategy(device=torch.device("cpu"))),),
        *(("precision", value) for value in (*PRECISIONS, 16, 32, 64, "16", "bf16", "64", "transformer-engine", None)),
        *(("logger", value) for value in (True, False, None, CSVLogger("."), [CSVLogger(".")], (), iter(()))),
        *(("logger", value) for value in (Alike(), [Alike()])),
        *(("callbacks", value) for value in (None, [], Callback(), [Callback()], (ModelCheckpoint(),), iter(()))),
        *(("callbacks", value) for value in (OfTheOtherPackage.Callback(), [OfTheOtherPackage.Callback()])),
        *(("fast_dev_run", value) for value in (True, False, 0, 1, 3)),
        *(("max_epochs", value) for value in (None, -1, 0, 3, np.int64(3))),
        *(("max_steps", value) for value in (-1, 0, 3, 1e6)),
        *(("min_steps", value) for value in (None, 3, 1e3)),
        *(("max_time", value) for value in (None, "00:12:00:00", " 123:12:00:00 ", {"hours": 1.5})),
        *(("max_time", value) for value in (datetime.timedelta(1), {"days": 1, "minutes": 1})),
        *(("val_check_interval", value) for value in (None, 0.25, 1.0, 1, 100, 3.0, "0:0:1:0", "00:00:01:00")),
        *(("val_check_interval", value) for value in (datetime.timedelta(minutes=1), {"minutes": 1})),
        *(("limit_train_batches", value) for value in (None, 0, 1, 7, 0.0, 0.5, 1.0, 7.0, False, np.float32(0.5))),
        *(("overfit_batches", value) for value in (0.0, 0.1, 3)),
        *(("check_val_every_n_epoch", value) for value in (None, 1, 5)),
        *(("num_sanity_val_steps", value) for value in (None, -1, 0, 2, False)),
        *(("log_every_n_steps", value) for value in (None, 0, 1, False)),
        *(("enable_progress_bar", value) for value in (None, True, False, 0, 1)),
        *(("gradient_clip_val", value) for value in (None, 0, 1, 0.5, float("inf"), np.float64(1))),
        *(("gradient_clip_algorithm", value) for value in (None, "norm", "value", "NORM")),
        *(("deterministic", value) for value in (None, True, False, "warn")),
        *(("profiler", value) for value in (None, "simple", "Advanced", "pytorch", "xla", PassThroughProfiler())),
        *(("plugins", value) for value in (None, [], DoublePrecision(), [TorchCheckpointIO(), LightningEnvironment()])),
        *(("default_root_dir", value) for value in (None, ".", Path(), "s3://bucket/runs")),
        *(("resume", value) for value in (None, "auto", "last", Path("x.ckpt"))),
        *(("compile", value) for value in (None, True, False, "max-autotune")),
        *(("hang_timeout_s", value) for value in (None, 1, 0.5)),
        *(("micro_batch_size", value) for value in (None, "auto", 4)),
    ],
    ids=lambda value: re.sub(" object at 0x[0-9a-f]+", "", str(value)),  # the same in each run
)
def test_every_form_that_lightning_and_the_engine_document_is_accepted(name, value):
    check_arguments({name: value})


def test_the_devices_of_an_accelerator_of_the_users_are_its_own_to_read():
    check_arguments({"accelerator": Registered(), "devices": "cores:2"})
    assert engine(accelerator=Registered(), devices="cores:2").num_devices == 2


def test_numbers_of_numpys_and_steps_in_floating_point_train():
    run = engine(max_epochs=None, max_steps=2e0, devices=np.int64(1), limit_train_batches=np.int64(3))
    run.fit(Seen(), rows())
    assert run.global_step == 2
