"""The frozen arguments of an engine: the same as its signature, checked, printed and saved."""

import dataclasses
import inspect
import json

import pytest

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checks import ArgumentError, check_arguments
from polyphase.engine.config import GROUPS, EngineConfig, field_docs

from .tiny import Regression, engine, rows

DEFAULTS = {name: p.default for name, p in inspect.signature(Engine.__init__).parameters.items() if name != "self"}


def test_its_defaults_are_those_of_the_signature():
    assert EngineConfig().arguments == DEFAULTS
    assert str(EngineConfig()) == "Engine()"


def test_each_field_says_what_it_is():
    assert field_docs(EngineConfig).keys() == {field.name for field in dataclasses.fields(EngineConfig)}


def test_each_field_has_its_place_in_the_help_and_an_example():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["group"] in ("", *GROUPS)
        assert field.metadata["example"] not in ("", str(field.default).lower())


def test_it_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError, match="uneven"):
        engine().config.uneven = "drop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uneven": "dorp"}, "unknown value of uneven 'dorp'. Did you mean 'drop'?"),
        ({"max_steps": -2}, "max_steps must be a whole number of at least -1, but got -2"),
    ],
)
def test_a_wrong_value_is_an_error(arguments, message):
    with pytest.raises(ArgumentError, match=message.replace("?", r"\?")):
        check_arguments(EngineConfig(**arguments).changed)


def test_it_prints_what_differs_from_the_defaults():
    config = EngineConfig(strategy="ddp", hang_timeout_s=float("600"), max_steps=3, max_epochs=None)
    assert str(config) == "Engine(strategy='ddp', max_steps=3)"


def test_it_is_saved_with_the_run(tmp_path):
    flags = {"default_root_dir": tmp_path, "max_steps": 2, "global_batch_size": 4, "gradient_clip_val": 0.5}
    trainer = engine(resume="auto", callbacks=[Snapshot(tmp_path / "kept")], **flags)
    trainer.fit(Regression(), rows())
    saved = json.loads((tmp_path / "kept" / ".run.json").read_text())["config"]
    assert saved == trainer.config.as_plain
    assert saved.items() >= {**flags, "default_root_dir": str(tmp_path), "callbacks": "Snapshot"}.items()
