"""A data set that replaces the user's while a loader makes its iterators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

__all__ = ["DatasetProxy", "substitute_dataset"]


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
