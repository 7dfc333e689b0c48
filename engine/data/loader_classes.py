"""Removes Lightning's patches of loader classes if the hook that makes a loader raises.

Lightning records the arguments of loaders and batch samplers by patched methods of their classes
(`_replace_dunder_methods`), and removes the patches only if nothing is raised. In a notebook, each later run
would work with patched classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.data import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader

__all__ = ["restoring_loader_classes"]

_PATCHED = ("__init__", "__setattr__", "__delattr__")


@contextmanager
def restoring_loader_classes() -> Iterator[None]:
    """Context of a run: after an exception, no class of loaders or batch samplers stays patched."""
    try:
        yield
    except BaseException:
        for base in (DataLoader, BatchSampler):
            for cls in {base, *get_all_subclasses(base)}:
                _restore(cls)
        raise


def _restore(cls: type) -> None:
    for name in _PATCHED:
        kept = f"__old{name}"  # Lightning: where _replace_dunder_methods keeps the class's own
        if kept in vars(cls):
            setattr(cls, name, vars(cls)[kept])
            delattr(cls, kept)
