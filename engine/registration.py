"""The check that registering a strategy and a comm hook from outside the package have in common."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from .flags import LAUNCHERS
from .lazy import Reference

__all__ = ["check_new_name"]


def check_new_name(kind: str, name: str, made: Any, taken: Mapping[str, Any], reserved: Collection[str] = ()) -> None:
    """Checks that `name` can be a flag's, and is not another thing's already.

    The same class or function may be registered again: a notebook's cell is run twice, a module imported anew.

    Args:
        kind: ``"strategy"`` or ``"compression"``, for the messages.
        name: of the flag.
        made: class or function that is registered.
        taken: what each name stands for, or what gives it.
        reserved: names that mean something without being in `taken`.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*(\+[a-z][a-z0-9_]*)*", name):
        raise ValueError(f"a {kind} can't be named {name!r}: small letters, digits and _, as in 'my_{kind}'.")
    if kind == "compression" and "+" in name:
        raise ValueError(f"a compression can't be named {name!r}: behind + stands the dtype, as in 'powersgd+fp16'.")
    suffix = next((s for s in LAUNCHERS if s and name.endswith(f"_{s}")), None)
    if suffix is not None:
        raise ValueError(f"a {kind} can't be named {name!r}: the suffix _{suffix} chooses how processes start.")
    if name in reserved:
        raise ValueError(f"{kind} {name!r} exists already; choose another name.")
    if name in taken and _path_of(taken[name]) != _path_of(made):
        raise ValueError(f"{kind} {name!r} exists already, as {_path_of(taken[name])}; choose another name.")


def _path_of(thing: Any) -> str:
    """Returns the module and the name of a class or function, also if it is only referred to."""
    if isinstance(thing, Reference):
        return thing.path
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
