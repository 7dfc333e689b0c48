"""Names that are imported at first use, and the names of strategies and comm hooks that other packages register."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .flags import LAUNCHERS

__all__ = [
    "COMM_HOOK_GROUP",
    "STRATEGY_GROUP",
    "Reference",
    "check_new_name",
    "import_on_access",
    "load_plugin",
    "plugin_names",
]


def import_on_access(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names live in its modules (PEP 562).

    Args:
        package: its ``__name__``.
        homes: module of each public name, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)  # the next access doesn't come here
        return value

    return get


@dataclasses.dataclass(frozen=True)
class Reference:
    """A class or function named ``"module:name"``; its module is imported when it is first called."""

    path: str
    """The module and the name, absolute, or relative to `package` with a leading dot."""
    package: str = ""

    def load(self) -> Any:
        """Imports the module, and returns the class or function."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module, self.package or None), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the class or function."""
        return self.load()(*args, **kwargs)


def check_new_name(
    kind: str, name: str, registered: Any, taken: Mapping[str, Any], reserved: Collection[str] = ()
) -> None:
    """Checks that `name` is a valid name for a flag, and is not in use.

    The same class or function may be registered again, when a notebook's cell is run twice or a module is reloaded.

    Args:
        kind: ``"strategy"`` or ``"compression"``, for the messages.
        name: name of the flag.
        registered: class or function that is registered.
        taken: the class or function of each name in use, or a reference to it.
        reserved: further names that have a meaning.

    Raises:
        ValueError: the name is invalid or in use.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*(\+[a-z][a-z0-9_]*)*", name):
        raise ValueError(f"a {kind} can't be named {name!r}: small letters, digits and _, as in 'my_{kind}'.")
    if kind == "compression" and "+" in name:
        raise ValueError(f"a compression can't be named {name!r}: the dtype comes after +, as in 'powersgd+fp16'.")
    suffix = next((s for s in LAUNCHERS if s and name.endswith(f"_{s}")), None)
    if suffix is not None:
        raise ValueError(f"a {kind} can't be named {name!r}: the suffix _{suffix} chooses how processes start.")
    if name in reserved:
        raise ValueError(f"{kind} {name!r} exists already; choose another name.")
    if name in taken and _path_of(taken[name]) != _path_of(registered):
        raise ValueError(f"{kind} {name!r} exists already, as {_path_of(taken[name])}; choose another name.")


def _path_of(target: Any) -> str:
    """Returns the module and the name of a class or function, also of a `Reference` to one."""
    if isinstance(target, Reference):
        return target.path
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


# Strategies and comm hooks of installed packages, found by their entry points.
#
# A package names them in its pyproject.toml; importing the module registers them:
#
#     [project.entry-points."polyphase.strategies"]
#     mine = "my_package.my_strategy"      # calls register_strategy("mine", ...)
#
#     [project.entry-points."polyphase.comm_hooks"]
#     mine = "my_package.my_hook"          # calls register_comm_hook on a class named "mine"

STRATEGY_GROUP = "polyphase.strategies"
COMM_HOOK_GROUP = "polyphase.comm_hooks"


def plugin_names(group: str) -> list[str]:
    """The names that installed packages offer; the packages are not imported."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str) -> bool:
    """Imports the module that registers `name`; returns whether there is one."""
    from importlib.metadata import entry_points

    points = entry_points(group=group, name=name)
    for point in points:
        point.load()
    return bool(points)
