"""All private names of other packages are in one place, and the installed versions have them."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyphase.engine._compat import lightning, torch
from polyphase.engine._compat.attributes import ATTRIBUTES, OPTIONAL

ROOT = Path(__file__).parents[3]
SOURCES = [
    path for folder in ("engine", "callbacks", "doctor", "models") for path in sorted((ROOT / folder).rglob("*.py"))
]
COMPAT = ROOT / "engine" / "_compat"
TREES = {path: ast.parse(path.read_text()) for path in SOURCES if COMPAT not in path.parents}
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"}
"""Names of the standard library that begin with an underscore and are public."""
OF_PYTHON = {"_option_string_actions", "_resource_tracker"}
"""Private names of the standard library: of argparse and multiprocessing."""
OURS_ON_OTHERS = {"_local_class"}
"""Attributes that the packages themselves set on others' objects."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that the packages define themselves."""
    found: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def foreign_attributes() -> dict[str, str]:
    """Private attributes that code uses and that the packages do not define, each with a place."""
    own = own_names() | DOCUMENTED | OF_PYTHON | OURS_ON_OTHERS
    return {
        node.attr: f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
    }


def private_imports() -> Iterator[str]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                words = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and "polyphase" not in (node.module or ""):
                words = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            private = [word for word in words if any(is_private(part) for part in word.split("."))]
            yield from (f"{path.relative_to(ROOT)}:{node.lineno}: {word}" for word in private)


def has(owner: Any, name: str) -> bool:
    """Whether an owner has the name, or its class sets it on objects: in its source, or that of a base."""
    if hasattr(owner, name) or name in vars(owner).get("__annotations__", {}):
        return True
    if not inspect.isclass(owner):
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    bases = [base for base in owner.__mro__ if base.__module__.split(".")[0] in ("lightning", "torch", "torchmetrics")]
    return any(re.search(rf"\b(self|cls)\.{name}\b", inspect.getsource(base)) for base in bases)


def find(owner: str) -> Any:
    module, _, name = owner.partition(":")
    if module == "torch.ops.aten":
        return importlib.import_module("torch").ops.aten
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def test_private_names_are_imported_in_one_place():
    assert not list(private_imports()), "import them in engine/_compat, and from there"


@pytest.mark.parametrize("name", torch.__all__)
def test_torch_has_what_is_imported(name):
    assert getattr(torch, name) is not None


def test_the_tables_of_torch_say_the_same():
    assert sorted(torch.HOMES) == sorted(torch.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch.nothing  # noqa: B018 - asked for by its name


def test_each_import_is_used():
    used = {
        alias.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition("_compat")[1]
        for alias in node.names
    }
    assert used == {*torch.__all__, *lightning.__all__}


def test_private_attributes_are_in_the_table():
    known = {name for names in (*ATTRIBUTES.values(), *OPTIONAL.values()) for name in names}
    used = foreign_attributes()
    assert not {name: where for name, where in used.items() if name not in known}, "add them to _compat/attributes.py"
    assert not known - set(used), "nothing uses them any more"


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_installed_versions_have_the_attributes(owner):
    found = find(owner)
    assert not [name for name in ATTRIBUTES[owner] if not has(found, name)]


def test_importing_changes_nothing_of_torch_and_lightning():
    code = """
import importlib
import lightning.pytorch, torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.pipelining
import torch.distributed.rpc, torchmetrics, lightning.pytorch.loggers, torch.utils.data
from tests.engine.compat.libraries import contents, replaced, rules_added

before = contents()
import polyphase.engine, polyphase.callbacks, polyphase.doctor, polyphase.models
from polyphase.engine import Engine, fit, read_weights
for name in ("ddp", "dp", "zero1", "local_sgd", "fsdp", "tensor", "pipeline", "ps"):
    importlib.import_module(f"polyphase.engine.strategies.{name}")
after = contents()
print(*replaced(before, after), *rules_added(before, after), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The one exception: `load_from_checkpoint` opens directories of checkpoints, and all else as before.
    assert done.stdout.split("\n")[:-1] == ["('lightning.pytorch.core.saving', 'pl_load')"]
