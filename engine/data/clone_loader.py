"""Copies a loader with other attributes; the user's own loader is not changed."""

import copy
from typing import Any

from torch.utils.data import DataLoader

from .torchdatas import is_torchdata_loader

__all__ = ["clone_loader"]


def clone_loader(loader: DataLoader, mixin: type | None = None, **attributes: Any) -> Any:
    """Returns a copy of `loader` with other attributes; it is made without the constructor of its class.

    Args:
        loader: is not changed.
        mixin: a class that the copy's class derives from as well, before the class of the loader.
        **attributes: replace those of the loader.
    """
    clone: Any = copy.copy(loader)
    if mixin is not None:
        cls = type(loader)
        clone.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    # Not by setattr, which DataLoader forbids after its constructor.
    clone.__dict__.update(attributes, _iterator=None)
    if is_torchdata_loader(clone):
        clone.load_state_dict({})  # releases the iterator of the original, and loads nothing
    return clone
