"""Loaders that keep their own place: torchdata's `StatefulDataLoader`, for data that has no order to be dealt."""

import warnings
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["as_stateful", "is_stateful"]

_ARGUMENTS = (
    "dataset",
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def is_stateful(loader: Any) -> bool:
    """Whether `loader` says where it is, and can go on there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def as_stateful(loader: DataLoader) -> DataLoader:
    """A `StatefulDataLoader` in place of a plain loader over an `IterableDataset`; any other loader as it is."""
    if type(loader) is not DataLoader:
        return loader
    with warnings.catch_warnings():
        # Of torchdata's to torch 2.13; nothing a user could change.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(**{name: getattr(loader, name) for name in _ARGUMENTS})
