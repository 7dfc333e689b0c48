"""The flags of a command are what its method and the engine take: the table is read without torch."""

import inspect

import pytest

from polyphase.engine import Engine
from polyphase.engine.cli.lightning_cli import _CLI
from polyphase.engine.cli.runs import RUNS, flags_of
from polyphase.engine.config import GROUPS, EngineConfig

OTHER = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
COMMON = {"model", "model.NAME", "data", "data.NAME", "config", "print_config", "seed_everything"}


@pytest.mark.parametrize("command", list(RUNS))
def test_it_has_every_argument_of_a_command(command, monkeypatch):
    method = command.replace("-", "_")
    taken = set(inspect.signature(getattr(Engine, method)).parameters) - {"self"} - OTHER
    own = set(flags_of(command)) - set(EngineConfig.__dataclass_fields__)
    assert own - COMMON - {"optimizer", "lr_scheduler"} == taken
    monkeypatch.setattr("sys.argv", ["polyphase", method])
    assert list(_CLI.subcommands()) == [method]


@pytest.mark.parametrize("command", list(RUNS))
def test_each_flag_is_told_in_a_sentence(command):
    for name, flag in flags_of(command).items():
        assert flag.group in ("", "What to run", *GROUPS)
        assert 0 < len(flag.meaning) < 180, name
