"""The engine's arguments are seen alike by `inspect`, the documentation, the command's parser and `fit`."""

import inspect
import re
import typing

import lightning.pytorch.trainer.connectors.accelerator_connector as lightnings
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser

from polyphase.engine import Engine, fit, flags
from polyphase.engine.compression import COMM_HOOKS
from polyphase.engine.config import EngineConfig, types_of
from polyphase.engine.flags import Layout
from polyphase.engine.precision import OF_BLOCKS, PRECISIONS
from polyphase.engine.strategies import STRATEGIES

OURS = {
    "activation_checkpointing": "none",
    "offload": None,
    "enable_run_summary": None,
    "check_first_steps": "auto",
    "checkpoint_format": "auto",
    "on_rank_loss": "stop",
    "compile": False,
    "compression": "none",
    "global_batch_size": None,
    "hang_timeout_s": 600.0,
    "micro_batch_size": None,
    "finetune": "none",
    "nonfinite": "warn",
    "resume": None,
    "seed_samples": False,
    "skip_spikes": None,
    "uneven": "pad",
}
"""Arguments that Trainer does not have, with their defaults."""


def parameters(function):
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def test_the_arguments_are_trainers_by_name_and_default_and_ours():
    trainers = {name: p.default for name, p in parameters(Trainer).items()}
    assert {name: p.default for name, p in parameters(Engine).items()} == {**trainers, **OURS}
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters(Engine).values())


@pytest.mark.parametrize("function", [Engine, Engine.__init__, fit], ids=["Engine", "__init__", "fit"])
def test_no_signature_hides_an_argument_or_its_type(function):
    named = parameters(function)
    assert list(types_of(EngineConfig)) == [name for name in named if name not in ("module", "data")]
    assert all(p.annotation is not p.empty for p in named.values())
    assert not [p for p in named.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def test_what_trainer_accepts_by_its_annotation_the_engine_accepts_by_its_own():
    """Each type of Trainer's union is one of ours; where it has a plain text for a closed set, ours are the texts."""
    theirs, ours = typing.get_type_hints(Trainer.__init__), types_of(EngineConfig)
    narrower = {"gradient_clip_algorithm": {str}, "profiler": {str}}
    wider = {"callbacks", "plugins"}  # any sequence, where Trainer names lists
    for name in set(parameters(Trainer)) - wider:
        assert options(theirs[name]) - options(ours[name]) == narrower.get(name, set()), name


def options(hint):
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    is_union = type(None) in typing.get_args(hint) or typing.get_origin(hint) in (typing.Union, type(int | str))
    return set().union(*map(options, typing.get_args(hint))) if is_union else {hint}


def test_each_argument_is_documented_in_the_order_of_the_signature():
    documented = re.findall(r"^ {4}(\w+): ", Engine.__doc__.partition("Args:")[2], re.MULTILINE)
    assert documented == list(parameters(Engine))


@pytest.mark.parametrize(
    ("choice", "table"),
    [
        (flags.StrategyName, {"auto", *STRATEGIES}),
        (flags.CompressionName, {"none", *COMM_HOOKS}),
        (flags.AcceleratorName, {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}),
        (flags.PrecisionName, options(lightnings._PRECISION_INPUT) | set(OF_BLOCKS)),
        (flags.Axis, set(Layout().axes)),
    ],
    ids=lambda value: "",
)
def test_the_closed_sets_are_those_of_the_tables(choice, table):
    assert set(typing.get_args(choice)) == table


def test_each_other_precision_of_ours_is_one_of_lightnings():
    assert set(PRECISIONS) - set(OF_BLOCKS) < options(lightnings._PRECISION_INPUT)


def test_the_parser_of_lightnings_command_sees_each_argument():
    parser = LightningArgumentParser()
    added = parser.add_lightning_class_args(Engine, "trainer", subclass_mode=False)
    assert added == [f"trainer.{name}" for name in parameters(Engine)]
    help_of = {action.dest: action.help for action in parser._actions}
    assert all(help_of[f"trainer.{name}"] for name in parameters(Engine))


def test_the_parser_takes_what_python_takes():
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Engine, "trainer", subclass_mode=False)
    words = {
        "strategy": "hsdp:replicate=2",
        "devices": "2",
        "precision": "bf16-mixed",
        "compile": "reduce-overhead",
        "max_time": "00:01:00:00",
        "val_check_interval": "0.5",
        "micro_batch_size": "auto",
        "global_batch_size": "8",
        "logger": "false",
    }
    given = parser.parse_args([f"--trainer.{name}={word}" for name, word in words.items()]).trainer
    assert (given.strategy, given.devices, given.precision) == ("hsdp:replicate=2", "2", "bf16-mixed")
    assert (given.max_time, given.val_check_interval) == ("00:01:00:00", 0.5)
    assert (given.micro_batch_size, given.global_batch_size) == ("auto", 8)
    assert (given.compile, given.logger) == ("reduce-overhead", False)
