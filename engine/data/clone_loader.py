"""Copies a loader with other attributes; the user's own loader is not changed."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

__all__ = [
    "DatasetProxy",
    "classes_of_torchdata",
    "clone_loader",
    "is_torchdata_loader",
    "substitute_dataset",
]


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


# --- recognises torchdata's `StatefulDataLoader`, without importing torchdata
# An object of a library exists only if the library was imported, so nothing has to be imported to recognise it.


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


# --- a data set that replaces the user's while a loader makes its iterators


class DatasetProxy(IterableDataset[Any]):
    """Replaces a stream, and has its attributes.

    Args:
        dataset: the user's.
    """

    _lacks: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes of the user's data set that this one does not have."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._lacks or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A hook may set the epoch of its loader's data set.
        owner = self.dataset if name == "epoch" else None
        super().__setattr__(name, value) if owner is None else setattr(owner, name, value)


@contextmanager
def substitute_dataset(loader: DataLoader, dataset: Any) -> Iterator[None]:
    """Context in which the iterators and workers that `loader` makes read `dataset` instead of the user's data set.

    Args:
        loader: changed within the context.
        dataset: has the user's data set as its attribute `dataset`.
    """
    users = {name: loader.__dict__[name] for name in ("dataset", "worker_init_fn")}
    # Not by setattr, which DataLoader forbids after its constructor.
    loader.__dict__.update(dataset=dataset, worker_init_fn=_UsersInit(users["worker_init_fn"]))
    try:
        yield
    finally:
        loader.__dict__.update(users)


class _UsersInit:
    """A `worker_init_fn` that gives `get_worker_info` the user's data set, and calls the user's function."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        """Called in a worker before it reads."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info object is frozen
        if self._users is not None:
            self._users(worker)
