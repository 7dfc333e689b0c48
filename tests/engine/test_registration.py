"""Strategies and comm hooks that come from outside the package."""

import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Literal

import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from polyphase.engine.compression import COMM_HOOKS, CommHook, make_comm_hook, register_comm_hook
from polyphase.engine.compression.registry import ROWS
from polyphase.engine.strategies import STRATEGIES, register_strategy
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import DDPOptions
from polyphase.engine.strategies.registry import LIGHTNINGS_OWN
from tests.distributed import run_command
from tests.engine.tiny import engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class MineOptions(DDPOptions):
    key: int = 1
    mode: Literal["fast", "exact"] = "fast"


class Mine(DDP): ...


class Rounded(CommHook):
    name = "rounded"
    description = "all-reduce of gradients rounded to a step: rounded[:step]; step 0.001"

    def __init__(self, step: float = 1e-3, shift: bool = False) -> None:
        super().__init__()
        self.rounding_step, self.shift = step, shift

    def average(self, bucket, wire) -> None:
        bucket.gradients.div_(self.rounding_step).round_().mul_(self.rounding_step / wire.size)
        wire.all_reduce(bucket.gradients)


@pytest.fixture(autouse=True)
def tables_as_they_were():
    before = [(table, dict(table)) for table in (STRATEGIES, ROWS)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


def register_mine(**changes) -> None:
    register_strategy("mine", Mine, **{"description": "ddp, my way", "options": MineOptions, **changes})


def test_a_registered_strategy_is_a_flag_with_options():
    register_mine(compressions="all")
    run = engine(strategy="mine_spawn:key=2,mode=exact,bucket_cap_mb=10", devices=2, compression="powersgd:2")
    assert type(run.strategy) is Mine
    assert run.strategy.options == MineOptions(key=2, mode="exact", bucket_cap_mb=10)
    assert run.strategy.launcher_suffix == "spawn"
    assert run.strategy.comm_hook.name == "powersgd"
    with pytest.raises(ValueError, match=r"unknown option of strategy 'mine' 'kye'. Did you mean 'key'?"):
        engine(strategy="mine:kye=2", devices=2)
    with pytest.raises(ValueError, match=r"value of strategy 'mine':mode 'exat'. Did you mean 'exact'?"):
        engine(strategy="mine:mode=exat", devices=2)


def test_what_a_registered_strategy_does_not_declare_is_refused():
    register_mine(compressions=["bf16"], precisions=["32-true"])
    assert engine(strategy="mine", devices=2, compression="bf16").strategy.comm_hook.name == "bf16"
    with pytest.raises(ValueError, match=r"'mine' can't do compression 'sign'.* It can do: none, bf16"):
        engine(strategy="mine", devices=2, compression="sign")
    with pytest.raises(ValueError, match=r"'mine' can't do precision '16-mixed'.* It can do: 32-true"):
        engine(strategy="mine", devices=2, precision="16-mixed")


def test_a_strategy_of_lightnings_can_be_registered():
    register_strategy("plain_ddp", lambda options, launcher, comm_hook: DDPStrategy(), description="stock")
    assert type(engine(strategy="plain_ddp", devices=2).strategy) is DDPStrategy


def test_a_registered_comm_hook_is_a_flag_with_options():
    assert register_comm_hook(Rounded) is Rounded
    assert COMM_HOOKS["rounded"] is Rounded
    hook = make_comm_hook("rounded:0.5,shift=true")
    assert (type(hook), hook.rounding_step, hook.shift) == (Rounded, 0.5, True)
    assert engine(strategy="ddp", devices=2, compression="rounded").strategy.comm_hook.rounding_step == 1e-3
    with pytest.raises(ValueError, match="'fsdp' can't do compression 'rounded'"):
        engine(strategy="fsdp", devices=2, compression="rounded")
    with pytest.raises(ValueError, match=r"unknown compression 'ruonded'. Did you mean 'rounded'?"):
        make_comm_hook("ruonded")
    with pytest.raises(ValueError, match=r"option of compression 'rounded' 'stpe'. Did you mean 'step'?"):
        make_comm_hook("rounded:stpe=1")


def test_registering_again_is_no_clash():
    for _ in range(2):
        register_mine()
        register_comm_hook(Rounded)


class Other(Rounded): ...


class NoWords(CommHook):
    name = "no_words"

    def average(self, bucket, wire) -> None: ...


class Untyped(Rounded):
    name = "untyped"

    def __init__(self, step=1) -> None: ...


class Unnamed(Rounded):
    name = "unnamed"

    def __init__(self, **step: int) -> None: ...


class Plus(Rounded):
    name = "a+b"


class NoneAgain(Rounded):
    name = "none"


@pytest.mark.parametrize(
    ("hook", "kind", "message"),
    [
        (Rounded(), TypeError, "takes a subclass of polyphase.engine.compression.CommHook, not <"),
        (int, TypeError, "takes a subclass of polyphase.engine.compression.CommHook, not <class 'int'>"),
        (NoWords, TypeError, "the comm hook NoWords lacks description"),
        (CommHook, TypeError, "the comm hook CommHook lacks name, description, average"),
        (Untyped, TypeError, "the parameter 'step' of Untyped needs a type and a default"),
        (Unnamed, TypeError, "the constructor of Unnamed must name its parameters"),
        (Plus, ValueError, "can't be named 'a+b': the dtype comes after +"),
        (NoneAgain, ValueError, "compression 'none' exists already"),
        (Other, ValueError, f"compression 'rounded' exists already, as {__name__}.Rounded; choose another name"),
    ],
)
def test_a_comm_hook_that_cannot_be_registered(hook, kind, message):
    register_comm_hook(Rounded)
    with pytest.raises(kind, match=re.escape(message)):
        register_comm_hook(hook)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("ddp", {}, ValueError, "strategy 'ddp' exists already, as .ddp:DDP; choose another name"),
        ("auto", {}, ValueError, "strategy 'auto' exists already"),
        ("single", {}, ValueError, "strategy 'single' exists already"),
        ("deepspeed", {}, ValueError, "strategy 'deepspeed' exists already"),
        ("my_spawn", {}, ValueError, "can't be named 'my_spawn': the suffix _spawn chooses how processes start"),
        ("My", {}, ValueError, "can't be named 'My': small letters, digits and _"),
        (3, {}, ValueError, "can't be named 3"),
        ("my", {"make": "Mine"}, TypeError, "needs a class or function that makes the strategy, but got 'Mine'"),
        ("my", {"description": ""}, TypeError, "needs a description"),
        ("my", {"options": dict}, TypeError, "the options of strategy 'my' must be a dataclass, but got <class 'dict'"),
        ("my", {"compressions": ["bf61"]}, ValueError, "unknown compression 'bf61'. Did you mean 'bf16'?"),
        ("my", {"precisions": "bf16"}, ValueError, "unknown precision 'bf16'. Did you mean 'bf16-true'?"),
    ],
)
def test_a_strategy_that_cannot_be_registered(name, changes, kind, message):
    arguments = {"make": Mine, "description": "x", **changes}
    with pytest.raises(kind, match=re.escape(message)):
        register_strategy(name, **arguments)


def test_options_need_defaults():
    with pytest.raises(TypeError, match="the option 'key' of strategy 'my' needs a default"):
        register_strategy("my", Mine, description="x", options=dataclasses.make_dataclass("Bare", [("key", int)]))


def test_names_of_lightnings_own_are_lightnings():
    theirs = {name for name in StrategyRegistry.available_strategies() if not name.startswith("ddp")} - {"fsdp"}
    assert theirs == set(LIGHTNINGS_OWN)


SCRIPT = """
import dataclasses, sys
import polyphase
from polyphase.engine.compression import CommHook, register_comm_hook
from polyphase.engine.strategies import register_strategy
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import DDPOptions
from polyphase.models import Digits, DigitsClassifier

@dataclasses.dataclass(frozen=True, kw_only=True)
class MineOptions(DDPOptions):
    key: int = 1

class Mine(DDP): ...

register_strategy("mine", Mine, options=MineOptions, description="ddp, my way", compressions="all")

@register_comm_hook
class Rounded(CommHook):
    name = "rounded"
    description = "rounded gradients"

    def __init__(self, step: float = 1e-3) -> None:
        super().__init__()
        self.rounding_step = step

    def average(self, bucket, wire):
        bucket.gradients.div_(self.rounding_step).round_().mul_(self.rounding_step / wire.size)
        wire.all_reduce(bucket.gradients)

if __name__ == "__main__":
    engine = polyphase.Engine(
        strategy=sys.argv[1], compression="rounded:0.001", devices=2, accelerator="cpu", max_steps=3, logger=False,
        enable_checkpointing=False, limit_val_batches=0, enable_progress_bar=False,
    )
    engine.fit(DigitsClassifier(), datamodule=Digits())
    # As one string, since both ranks print.
    print(f"trained by {type(engine.strategy).__name__} {engine.strategy.options.key} {engine.bytes_compressed}")
"""


@pytest.mark.parametrize("suffix", ["", "_spawn"])
def test_a_script_that_registers_trains_in_children_too(tmp_path, suffix):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    finished = run_command([sys.executable, path, f"mine{suffix}:key=7"])
    assert finished.returncode == 0, finished.output
    assert "`max_steps=3` reached" in finished.output
    assert "trained by Mine 7" in finished.output


def test_an_installed_package_brings_them_by_entry_points(tmp_path, monkeypatch):
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[polyphase.strategies]\nmine = their_package\n[polyphase.comm_hooks]\nrounded = their_package\n"
    )
    Path(tmp_path, "their_package.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    run = engine(strategy="mine:key=3", devices=2, compression="rounded")
    assert (type(run.strategy).__module__, run.strategy.options.key) == ("their_package", 3)
    assert type(run.strategy.comm_hook).__name__ == "Rounded"
    assert isinstance(run.strategy.comm_hook.rounding_step, float)
    sys.modules.pop("their_package")


def test_the_table_of_hooks_says_what_the_classes_are():
    """The table is read without torch; this is what keeps it true."""
    for name, row in ROWS.items():
        hook = row.load()
        assert (hook.name, hook.description) == (name, row.description)
        assert (hook.reduces_shards, hook.takes_dtype) == (row.reduces_shards, row.takes_dtype)
        parameters = list(inspect.signature(hook.__init__).parameters.values())[1:]
        types = typing.get_type_hints(hook.__init__)
        fields = [(field.name, field.type, field.default) for field in dataclasses.fields(row.options)]
        assert fields == [(p.name, types[p.name], p.default) for p in parameters], name
