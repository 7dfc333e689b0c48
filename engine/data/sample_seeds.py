"""Seeds random draws by (seed, epoch, sample): a sample's augmentation is the same on any rank and in any worker.

While a loader makes its iterator, a `SeededSamples` replaces its data set; the iterator and its workers keep it, and
the loader has the user's again. Before each sample the global generators of the process are seeded; after each batch
they are restored, so that model, sampler and collation draw the same numbers as without seeds.
"""

import operator
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..checkpoint.rng import derive_seed
from .clone_loader import classes_of_torchdata, clone_loader, is_torchdata_loader, substitute_dataset
from .stateful import is_stateful

__all__ = ["SeededSamples", "check_seedable", "seed_samples"]


class SeededSamples:
    """Reads a data set sample by sample, each with the generators seeded by its index.

    Args:
        dataset: the user's, with a `__getitem__` or `__getitems__`.
        key: the seed, and numbers that differ between loaders.
        is_shared: whether the epoch is in shared memory, for workers that stay over epochs.
    """

    def __init__(self, dataset: Any, key: tuple[int, ...], *, is_shared: bool) -> None:
        self.dataset = dataset
        self._key = key
        self._epoch = torch.zeros((), dtype=torch.int64)
        if is_shared:
            self._epoch.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the samples that are read from now on."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with _left_as_they_are():
            self._seed(int(self._epoch), index)
            return self.dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """Returns the samples of a batch, read one by one: the other samples of the batch must not matter."""
        several, epoch = getattr(self.dataset, "__getitems__", None), int(self._epoch)
        samples: list[Any] = []
        with _left_as_they_are():
            for index in indices:
                self._seed(epoch, index)
                samples.extend(several([index]) if several else [self.dataset[index]])
        return samples

    def _seed(self, epoch: int, index: Any) -> None:
        seed = derive_seed(*self._key, epoch, *_numbers(index))
        random.seed(seed)
        np.random.seed(seed >> 31)
        torch.default_generator.manual_seed(seed)  # the CPU's only: torch.manual_seed seeds devices, too


def _numbers(index: Any) -> tuple[int, ...]:
    """Maps an index to integers, the same in every process; Python's hash of a text differs between processes."""
    if isinstance(index, (tuple, list)):
        return (len(index), *(number for item in index for number in _numbers(item)))
    if isinstance(index, (str, bytes)):
        return (zlib.crc32(index.encode() if isinstance(index, str) else index),)
    try:
        return (operator.index(index),)
    except TypeError:
        raise TypeError(
            f"seed_samples=True seeds each sample by its index, but got the index {index!r}: let the sampler yield"
            " whole numbers, texts, or tuples of these; or give seed_samples=False."
        ) from None


@contextmanager
def _left_as_they_are() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class _SeededLoader(DataLoader):
    """A loader whose iterators read `samples` instead of its data set."""

    samples: SeededSamples
    sample_epoch: Callable[[], int]
    """Returns the number of the current epoch."""

    def __iter__(self) -> Any:
        with self._reading_samples():
            return super().__iter__()

    def _reading_samples(self) -> AbstractContextManager[None]:
        self.samples.set_epoch(self.sample_epoch())
        return substitute_dataset(self, self.samples)


class _SeededStatefulLoader(_SeededLoader):
    """A seeded `StatefulDataLoader`, which also makes an iterator in `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        with self._reading_samples():
            return super().state_dict()  # type: ignore[misc]


def _has_iter_of_its_own(loader: DataLoader) -> bool:
    known_classes = DataLoader, *classes_of_torchdata("stateful_dataloader", "StatefulDataLoader")
    return type(loader).__iter__ not in [cls.__iter__ for cls in known_classes]


def check_seedable(loader: Any) -> None:
    """Checks that the samples of a loader can be seeded by their indices.

    Raises:
        ValueError: they can't be.
    """
    if not isinstance(loader, DataLoader):
        problem = f"{type(loader).__name__} is no DataLoader over a data set with indices"
    elif loader._dataset_kind != 0:  # torch: _DatasetKind.Map
        problem = f"{type(loader.dataset).__name__} is an IterableDataset, whose samples have no index"
    elif _has_iter_of_its_own(loader):
        problem = f"{type(loader).__name__} has its own `__iter__`, so it is unknown how it reads samples"
    elif is_torchdata_loader(loader) and is_stateful(loader.dataset):
        problem = f"{type(loader.dataset).__name__} has a state of its own, on which its samples may depend"
    else:
        return
    raise ValueError(
        f"seed_samples=True seeds the random draws of each sample by its index, but {problem}: use a DataLoader over a"
        " data set with `__getitem__` and `__len__` for every loader, or give seed_samples=False."
    )


def seed_samples(loader: DataLoader, key: tuple[int, ...], epoch: Callable[[], int]) -> _SeededLoader:
    """Returns a copy of `loader` that seeds each sample by ``(*key, epoch, index)``.

    Args:
        loader: is not changed; one that `check_seedable` accepts.
        key: the seed, and numbers that differ between loaders.
        epoch: returns the number of the current epoch.
    """
    mixin = _SeededStatefulLoader if is_torchdata_loader(loader) else _SeededLoader
    samples = SeededSamples(loader.dataset, key, is_shared=loader.num_workers > 0)
    seeded: _SeededLoader = clone_loader(loader, mixin, samples=samples, sample_epoch=epoch)
    return seeded
