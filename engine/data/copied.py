"""A loader that differs from the user's: a copy, so that the user's own is left as it was."""

import copy
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["copied"]


def copied(loader: DataLoader, mixin: type | None = None, **attributes: Any) -> Any:
    """A copy of `loader` with other attributes; a subclass keeps whatever its constructor did.

    Args:
        loader: left as it is.
        mixin: what the copy's class shall be as well, before what it is.
        **attributes: in place of the loader's.
    """
    found: Any = copy.copy(loader)
    if mixin is not None:
        cls = type(loader)
        found.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    # Not by attribute: DataLoader forbids that once its workers may have been started, which these have not.
    found.__dict__.update(attributes, _iterator=None)
    if isinstance(found, StatefulDataLoader):
        found.load_state_dict({})  # lets go of an iterator of the original's, and loads nothing
    return found
