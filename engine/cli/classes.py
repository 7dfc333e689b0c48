"""Finds and checks the classes in a user's files from their source, without importing or running them."""

import ast
import dataclasses
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from ..flags import did_you_mean

__all__ = [
    "check_argument",
    "check_class_name",
    "class_arguments",
    "find_module",
    "missing_module",
    "models_of",
    "no_argument",
    "own_classes",
    "read",
]

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


def _kind_of(name: str, source: _Source, depth: int = 6) -> str | None:
    """Returns ``"model"`` or ``"data"`` for a class that derives from Lightning's; None if that is not visible."""
    if depth == 0:
        return None
    if name in source.classes:
        for base in source.classes[name].bases:
            short = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            kind = _BASES.get(short) or _kind_of(short, source, depth - 1)
            if kind:
                return kind
        return None
    origin = _origin(name, source)
    return _kind_of(*origin, depth - 1) if origin else None


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
    return tuple(name for name in source.imported if _kind_of(name, source) == kind) if source else ()


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
            if _kind_of(name, source) == kind:  # type: ignore[arg-type]
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


def check_class_name(kind: str, name: str) -> None:
    """Checks a short name, or an import path as far as its source files allow.

    Args:
        kind: ``"model"`` or ``"data"``.
        name: the value of the flag.

    Raises:
        ValueError: the class does not exist.
    """
    module, _, class_name = name.rpartition(".")
    if not module:
        _check_short_name(kind, name)
        return
    path = find_module(module)
    if path is None:
        raise ValueError(missing_module(module, class_name))
    source = read(path) if path else None
    if source is None or source.is_open or class_name in source.names:
        return
    package = os.path.dirname(path) if path.endswith("__init__.py") else None
    if package and os.path.exists(os.path.join(package, f"{class_name}.py")):
        raise ValueError(f"{name} is a module; name a class in it, as in --{kind} {name}.MyClass.")
    likely = [candidate for candidate in source.classes if _kind_of(candidate, source) == kind]
    hint = did_you_mean(class_name, [*likely, *source.imported], str) or did_you_mean(class_name, source.classes, str)
    list_of_classes = f" It has {', '.join(sorted(likely))}." if likely and not hint else ""
    raise ValueError(f"module {module} has no {class_name}.{hint}{list_of_classes}")


def _check_short_name(kind: str, name: str) -> None:
    model_names = models_of(kind)
    if name in model_names:
        return
    own = own_classes(kind)
    paths = [path for path, short in own.items() if short == name]
    if paths:
        hint = f" Did you mean --{kind} {paths[0]}?"
    else:
        shown = {name: name for name in model_names} | {short: path for path, short in own.items()}
        hint = did_you_mean(name, shown, lambda near: repr(shown[near]))
    raise ValueError(
        f"unknown {kind} class {name!r}.{hint} Allowed: {', '.join([*model_names, *own][:12])}."
        f" Name your own class by its import path: --{kind} package.Class."
    )


def missing_module(module: str, class_name: str) -> str:
    """Returns the message about a missing module: where it was searched, and a suggestion."""
    first = module.partition(".")[0]
    if first != module and find_module(first) is not None:
        return f"No module named {module!r}: there is {first!r}, but it has no such part."
    similar = [path for kind in ("model", "data") for path, name in own_classes(kind).items() if name == class_name]
    near = [file.removesuffix(".py") for file in os.listdir() if file.endswith(".py") or os.path.isdir(file)]
    hint = (
        f" Did you mean {similar[0]}?"
        if similar
        else did_you_mean(first, near, lambda n: f"{n}.{class_name or 'Class'}")
    )
    return f"No module named {module!r} in {os.getcwd()} or among what is installed.{hint}"


# --- arguments of the classes' constructors


def no_argument(class_name: str, name: str, names: Sequence[str]) -> str:
    """Returns the message about an argument that a class does not have."""
    hint = did_you_mean(name, names)
    list_of_arguments = "" if hint else f" It has {', '.join(names[:12])}." if names else " It has no arguments."
    return f"{class_name} has no {name!r}.{hint}{list_of_arguments}"


def check_argument(class_path: str, key: str, value: str | None) -> None:
    """Checks an argument of a class, as far as its source file allows: ``--model.lr 0.1``.

    Args:
        class_path: the value of ``--model`` or ``--data``.
        key: the text after the dot of ``--model.KEY``.
        value: the text of the value.

    Raises:
        ValueError: the class has no such argument, or the argument is a number and the value is not.
    """
    module, _, class_name = class_path.rpartition(".")
    path = find_module(module) if module else models_file()
    source = read(path) if path else None
    arguments = class_arguments(class_name, source) if source else None
    name = key.removeprefix("init_args.")
    if arguments is None or not name.isidentifier() or name in ("help", "class_path", "init_args", "dict_kwargs"):
        return
    if name not in arguments:
        raise ValueError(no_argument(class_name, name, list(arguments)))
    kind = re.sub(r"\s*\|\s*None|^Optional\[|\]$", "", re.split(" = | \\(required", arguments[name])[0])
    if value is not None and value.lower() not in ("null", "none", "~", "") and kind in ("int", "float"):
        try:
            float(value.replace("_", ""))
        except ValueError:
            words = {"int": "a whole number", "float": "a number"}[kind]
            raise ValueError(f"{value!r} is not {words}.") from None
