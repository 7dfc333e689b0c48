"""Random draws seeded by (seed, epoch, sample): a sample's augmentation is the same on any rank and in any worker.

While a loader makes its iterator, it has a `SeededSamples` in the place of its data set, which the iterator and its
workers keep; afterwards it has the user's again. Before each sample the global generators of the process are seeded;
after each batch they are as they were, so that the model, the sampler and the collation draw what they always draw.
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
from torchdata.stateful_dataloader import StatefulDataLoader

from ..seeds import mixed
from .copied import copied
from .stand_in import reading
from .stateful import is_stateful

__all__ = ["SeededLoader", "SeededSamples", "check_seedable", "seed_samples"]


class SeededSamples:
    """Reads a data set sample by sample, each with the generators seeded by its index.

    Args:
        dataset: the user's, with a `__getitem__` or `__getitems__`.
        key: the seed, and what else tells these samples from those of other loaders.
        is_shared: workers that stay are told of each epoch.
    """

    def __init__(self, dataset: Any, key: tuple[int, ...], *, is_shared: bool) -> None:
        self.dataset = dataset
        self._key = key
        self._epoch = torch.zeros((), dtype=torch.int64)
        if is_shared:
            self._epoch.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the samples are of that are read from now on."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with _left_as_they_are():
            self._seed(int(self._epoch), index)
            return self.dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """The samples of a batch, one by one: which others are in it must not matter."""
        several, epoch = getattr(self.dataset, "__getitems__", None), int(self._epoch)
        samples: list[Any] = []
        with _left_as_they_are():
            for index in indices:
                self._seed(epoch, index)
                samples.extend(several([index]) if several else [self.dataset[index]])
        return samples

    def _seed(self, epoch: int, index: Any) -> None:
        seed = mixed(*self._key, epoch, *_numbers(index))
        random.seed(seed)
        np.random.seed(seed >> 31)
        torch.default_generator.manual_seed(seed)  # of the CPU alone: torch.manual_seed seeds devices, too


def _numbers(index: Any) -> tuple[int, ...]:
    """Whole numbers that stand for an index in every process; the hash of a text differs from process to process."""
    if isinstance(index, (tuple, list)):
        return (len(index), *(number for part in index for number in _numbers(part)))
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


class SeededLoader(DataLoader):
    """A loader whose iterators read `samples` in the place of its data set, which stays the user's."""

    samples: SeededSamples
    sample_epoch: Callable[[], int]
    """Number of the present epoch."""

    def __iter__(self) -> Any:
        with self._reading_samples():
            return super().__iter__()

    def _reading_samples(self) -> AbstractContextManager[None]:
        self.samples.set_epoch(self.sample_epoch())
        return reading(self, self.samples)


class _SeededStatefulLoader(SeededLoader):
    """A seeded `StatefulDataLoader`: torchdata's also makes an iterator where it is asked for its state."""

    def state_dict(self) -> dict[str, Any]:
        with self._reading_samples():
            return super().state_dict()  # type: ignore[misc]


_ITERATED_BY = (DataLoader.__iter__, StatefulDataLoader.__iter__)


def check_seedable(loader: Any) -> None:
    """Says whether samples of a loader can be seeded by their indices.

    Raises:
        ValueError: they can't; the message says why, and what to do.
    """
    if not isinstance(loader, DataLoader):
        what = f"{type(loader).__name__} is no DataLoader over a data set with indices"
    elif loader._dataset_kind != 0:  # torch: _DatasetKind.Map
        what = f"{type(loader.dataset).__name__} is an IterableDataset, whose samples have no index"
    elif type(loader).__iter__ not in _ITERATED_BY:
        what = f"{type(loader).__name__} has an `__iter__` of its own, of which it can't be seen how it reads samples"
    elif isinstance(loader, StatefulDataLoader) and is_stateful(loader.dataset):
        what = f"{type(loader.dataset).__name__} has a state of its own, on which its samples may depend"
    else:
        return
    raise ValueError(
        f"seed_samples=True seeds the random draws of each sample by its index, but {what}: use a DataLoader over a"
        " data set with `__getitem__` and `__len__` for every loader, or give seed_samples=False."
    )


def seed_samples(loader: DataLoader, key: tuple[int, ...], epoch: Callable[[], int]) -> SeededLoader:
    """A copy of `loader`, of a subclass of its class, that seeds each sample by ``(*key, epoch, index)``.

    Args:
        loader: left as it is; one that `check_seedable` lets pass.
        key: the seed, and what else tells its samples from those of other loaders.
        epoch: number of the present epoch.
    """
    mixin = _SeededStatefulLoader if isinstance(loader, StatefulDataLoader) else SeededLoader
    samples = SeededSamples(loader.dataset, key, is_shared=loader.num_workers > 0)
    found: SeededLoader = copied(loader, mixin, samples=samples, sample_epoch=epoch)
    return found
