"""Checks the classes named by ``--model`` and ``--data`` in source files, before any of them is imported."""

import os
import re
from collections.abc import Sequence

from ..flags import did_you_mean
from . import classes

__all__ = ["check_argument", "check_class_name", "missing_module", "no_argument"]


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
    path = classes.find_module(module)
    if path is None:
        raise ValueError(missing_module(module, class_name))
    source = classes.read(path) if path else None
    if source is None or source.is_open or class_name in source.names:
        return
    package = os.path.dirname(path) if path.endswith("__init__.py") else None
    if package and os.path.exists(os.path.join(package, f"{class_name}.py")):
        raise ValueError(f"{name} is a module; name a class in it, as in --{kind} {name}.MyClass.")
    likely = [candidate for candidate in source.classes if classes.kind_of(candidate, source) == kind]
    hint = did_you_mean(class_name, [*likely, *source.imported], str) or did_you_mean(class_name, source.classes, str)
    list_of_classes = f" It has {', '.join(sorted(likely))}." if likely and not hint else ""
    raise ValueError(f"module {module} has no {class_name}.{hint}{list_of_classes}")


def _check_short_name(kind: str, name: str) -> None:
    model_names = classes.models_of(kind)
    if name in model_names:
        return
    own = classes.own_classes(kind)
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
    if first != module and classes.find_module(first) is not None:
        return f"No module named {module!r}: there is {first!r}, but it has no such part."
    similar = [
        path for kind in ("model", "data") for path, name in classes.own_classes(kind).items() if name == class_name
    ]
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
    path = classes.find_module(module) if module else classes.models_file()
    source = classes.read(path) if path else None
    arguments = classes.class_arguments(class_name, source) if source else None
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
