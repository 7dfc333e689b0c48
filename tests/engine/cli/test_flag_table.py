"""The table of flags says what the engine takes: it is read without torch, and this is what keeps it true."""

import inspect

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry

from polyphase.engine import Engine
from polyphase.engine.cli.check import COMMANDS, ENGINE_FLAGS, GROUPS, KINDS, RUN_FLAGS, check_value, flags_of
from polyphase.engine.cli.lightning_cli import _CLI

ARGUMENTS = {
    name: parameter
    for cls in (Trainer, Engine)
    for name, parameter in inspect.signature(cls.__init__).parameters.items()
    if name not in ("self", "trainer_flags")
}
OTHER = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}


def test_it_has_every_argument_of_the_engine_and_no_other():
    assert sorted(flag.name for flag in ENGINE_FLAGS) == sorted(ARGUMENTS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_it_has_every_argument_of_a_command(command):
    taken = set(inspect.signature(getattr(Engine, command.replace("-", "_"))).parameters) - {"self"} - OTHER
    common = {"model", "model.NAME", "data", "data.NAME", "config", "print_config", "seed_everything"}
    own = {flag.name for flag in RUN_FLAGS if command in flag.commands}
    assert own - common - {"optimizer", "lr_scheduler"} == taken


def test_the_commands_are_those_of_lightning_cli():
    assert {command.replace("-", "_") for command in COMMANDS} == set(_CLI.subcommands())


@pytest.mark.parametrize("flag", ENGINE_FLAGS, ids=lambda flag: flag.name)
def test_each_flags_default_and_example_are_values_of_it(flag):
    check_value(flag, flag.example, f"--{flag.name}")
    for choice in flag.choices:
        check_value(flag, choice, f"--{flag.name}")
    default = ARGUMENTS[flag.name].default
    if default is not None:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert flag.default in (shown, shown.removesuffix(".0"))
    assert flag.meaning
    assert flag.example != flag.default


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_flag_is_of_a_known_kind_and_group(command):
    for flag in flags_of(command):
        assert flag.kind in KINDS
        assert flag.group in ("", *GROUPS)


def test_the_accelerators_are_lightnings():
    (row,) = (flag for flag in ENGINE_FLAGS if flag.name == "accelerator")
    assert set(row.choices) == {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
