"""Finds the classes in a user's files from their source, without importing or running them."""

import ast
import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["class_arguments", "find_module", "kind_of", "models_of", "own_classes", "read"]

_BASES = {"LightningModule": "model", "LightningDataModule": "data"}
_MOST_FILES = 200
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "tests", "test", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class _Source:
    """The definitions at the top level of a Python file."""

    path: str
    classes: dict[str, ast.ClassDef]
    imported: dict[str, str]
    """``module:name`` of each imported name; the module has its leading dots."""
    names: frozenset[str]
    """All names, including those in `classes` and `imported`."""
    is_open: bool
    """Whether the file may have further names: by ``import *``, ``__getattr__``, ``globals()``."""


@functools.lru_cache(maxsize=256)
def read(path: str) -> _Source | None:
    """Returns the file's definitions; None if it can't be read or is not Python."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    classes: dict[str, ast.ClassDef] = {}
    imported: dict[str, str] = {}
    names: set[str] = set()
    is_open = "globals()" in text or "setattr(" in text
    for node in _top_level(tree):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_open |= node.name == "__getattr__"
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            is_open |= any(alias.name == "*" for alias in node.names)
            imported.update({alias.asname or alias.name: f"{module}:{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return _Source(path, classes, imported, frozenset({*classes, *imported, *names}), is_open)


def _top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also those inside if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _top_level(child)
        elif isinstance(child, ast.stmt):
            yield child


def find_module(name: str) -> str | None:
    """Finds the file of a module like an import, but without running parent packages.

    Returns:
        ``""`` if the module exists but has no Python file; None if it does not exist.
    """
    first, *rest = name.split(".")
    if first in sys.builtin_module_names:
        return ""
    path: list[str] = [os.getcwd(), *sys.path]
    for index in range(len(rest) + 1):
        full = ".".join([first, *rest[:index]])
        # A module that PathFinder does not find may be an editable install, which has its own import hook. The hook
        # imports parent packages, so it is asked last.
        spec = PathFinder.find_spec(full, path) or _hooked(full)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    return origin if origin and origin.endswith(".py") else ""


def _hooked(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    except Exception:  # raised by a parent package, which therefore exists
        return importlib.machinery.ModuleSpec(name, None)


def kind_of(name: str, source: _Source, depth: int = 6) -> str | None:
    """Returns ``"model"`` or ``"data"`` for a class that derives from Lightning's; None if that is not visible."""
    if depth == 0:
        return None
    if name in source.classes:
        for base in source.classes[name].bases:
            short = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            kind = _BASES.get(short) or kind_of(short, source, depth - 1)
            if kind:
                return kind
        return None
    origin = _origin(name, source)
    return kind_of(*origin, depth - 1) if origin else None


def _origin(name: str, source: _Source) -> tuple[str, _Source] | None:
    """Returns the original name of an imported class and the file that defines it; None if that is not looked up."""
    module, _, original = source.imported.get(name, "").partition(":")
    if not module:
        return None
    if module.startswith("."):
        level = len(module) - len(module.lstrip("."))
        folder = Path(source.path).parents[level - 1]
        stem = folder.joinpath(*filter(None, module.lstrip(".").split(".")))
        candidates = [stem.with_suffix(".py"), stem / "__init__.py"]
        path: str | None = next((str(path) for path in candidates if path.is_file()), None)
    elif module.partition(".")[0] in ("torch", "lightning", "pytorch_lightning", "numpy"):
        return None  # large packages; the names of their classes are enough
    elif module == "polyphase.models":
        path = models_file()
    else:
        path = find_module(module)
    defining = read(path) if path else None
    return None if defining is None else (original, defining)


def models_file() -> str:
    """Returns the path of `polyphase.models`."""
    spec = importlib.util.find_spec("polyphase.models")
    return (spec.origin if spec else None) or ""


@functools.cache
def models_of(kind: str) -> tuple[str, ...]:
    """Returns the names of the ``"model"`` or ``"data"`` classes of `polyphase.models`."""
    source = read(models_file())
    return tuple(name for name in source.imported if kind_of(name, source) == kind) if source else ()


def own_classes(kind: str, folder: str | None = None) -> dict[str, str]:
    """Returns the classes in the files of a folder and its subfolders, as ``{"module.Class": "Class"}``."""
    root = Path(folder or os.getcwd())
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    paths: dict[str, str] = {}
    for path in files[:_MOST_FILES]:
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in _SKIPPED or part.startswith((".", "test_")) or not part.isidentifier() for part in parts):
            continue
        source = read(str(path))
        for name in source.classes if source else ():
            if kind_of(name, source) == kind:  # type: ignore[arg-type]
                paths[".".join([*(part for part in parts if part != "__init__"), name])] = name
    return paths


def class_arguments(name: str, source: _Source, depth: int = 6) -> dict[str, str] | None:
    """Returns a constructor's arguments as ``name -> "type = default"``; None if not all of them are visible."""
    if depth == 0:
        return None
    if name not in source.classes:
        origin = _origin(name, source)
        return class_arguments(*origin, depth - 1) if origin else None
    node = source.classes[name]
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return None if statement.args.kwarg or statement.args.vararg else _written(statement.args)
    if len(node.bases) == 1 and not node.decorator_list:
        base = node.bases[0]
        short = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        return {} if short in _BASES else class_arguments(short, source, depth - 1)
    return None


def _written(arguments: ast.arguments) -> dict[str, str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True)][1:]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {
        argument.arg: (ast.unparse(argument.annotation) if argument.annotation else "")
        + (f" = {ast.unparse(default)}" if default is not None else " (required)")
        for argument, default in pairs
    }
