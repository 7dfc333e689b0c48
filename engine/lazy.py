"""Imports names when they are first used, so that code without torch does not wait for torch's import."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Reference", "import_on_access"]


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
