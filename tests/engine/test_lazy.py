"""Packages whose names are imported when they are first asked for."""

import importlib
import subprocess
import sys

import pytest

from polyphase.engine.registration import Reference

PACKAGES = ["polyphase.engine", *(f"polyphase.engine.{name}" for name in ("checkpoint", "compression", "strategies"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_is_there(name):
    package = importlib.import_module(name)
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018 - asked for by its name


def test_none_of_them_imports_torch():
    modules = [
        *PACKAGES,
        "polyphase.engine.checkpoint.commands",
        "polyphase.engine.launch.command",
        "polyphase.engine.cli",
    ]
    code = f"import sys, {', '.join(modules)}; assert not {{'torch', 'lightning'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_strategies_imports_none_of_them():
    modules = "polyphase.engine, polyphase.engine.strategies, polyphase.engine.cli.strategies"
    code = f"import sys, {modules}; print(*(name for name in sys.modules if name.startswith('polyphase')))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    folder = "polyphase.engine.strategies."
    table = {f"{folder}{name}" for name in ("options", "registry")}
    assert {name for name in found if name.startswith(folder)} == table


def test_a_reference_is_imported_when_it_is_called():
    assert Reference("fractions:Fraction")(1, 2).denominator == 2
    assert Reference(".registration:Reference", "polyphase.engine").load() is Reference
