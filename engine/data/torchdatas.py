"""Recognises torchdata's `StatefulDataLoader`, without importing torchdata.

An object of a library exists only if the library was imported, so nothing has to be imported to recognise it.
"""

import sys
from typing import Any

__all__ = ["classes_of_torchdata", "is_torchdata_loader"]


def classes_of_torchdata(module: str, name: str) -> tuple[Any, ...]:
    """Returns a class of torchdata in a tuple, for `isinstance`; an empty tuple if its module was not imported.

    Args:
        module: within ``torchdata.stateful_dataloader``.
        name: name of the class.
    """
    cls = getattr(sys.modules.get(f"torchdata.stateful_dataloader.{module}"), name, None)
    return () if cls is None else (cls,)


def is_torchdata_loader(loader: Any) -> bool:
    """Whether `loader` is a `StatefulDataLoader`."""
    return isinstance(loader, classes_of_torchdata("stateful_dataloader", "StatefulDataLoader"))
