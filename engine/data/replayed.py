"""Resumes streams whose state leaves out the examples in a shuffle buffer: reads them again from the epoch's start.

Hugging Face's `IterableDataset.shuffle` reads ahead into a buffer, and its `state_dict` counts the buffer's examples as
read. A pass over it depends on its epoch and the states of its generators only, so reading again up to the position is
exact; it takes the time of reading.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from .clone_loader import clone_loader
from .stand_in import DatasetProxy
from .stateful import is_hugging_face_dataset, is_stateful

__all__ = ["Replayed", "digest_of_generators", "iterables_of", "loses_its_buffer", "reread_if_buffered"]


class Replayed(DatasetProxy):
    """A Hugging Face data set without its `state_dict`, so that a loader reads it again up to its position."""

    _lacks = ("state_dict", "load_state_dict")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def reread_if_buffered(loader: DataLoader) -> DataLoader:
    """Returns `loader`; or, if its stream is Hugging Face's with a shuffle buffer, a copy that reads it again."""
    dataset: Any = loader.dataset
    # Not for a class of the user's that contains such a stream: its own state may be complete.
    if is_hugging_face_dataset(dataset) and loses_its_buffer(dataset):
        return clone_loader(loader, dataset=Replayed(dataset))
    return loader


def loses_its_buffer(dataset: Any) -> bool:
    """Whether the state of a data set leaves out the examples in a shuffle buffer."""
    # Hugging Face: BufferShuffledExamplesIterable
    names = {cls.__name__ for iterable in iterables_of(dataset) for cls in type(iterable).__mro__}
    return is_stateful(dataset) and "BufferShuffledExamplesIterable" in names


def digest_of_generators(dataset: Any) -> int | None:
    """Returns a checksum of the generators that draw the order of a Hugging Face data set; None without any."""
    values = [value for iterable in iterables_of(dataset) for value in vars(iterable).values()]
    states = [repr(value.bit_generator.state) for value in values if isinstance(value, np.random.Generator)]
    return zlib.crc32("".join(states).encode()) if states else None


def iterables_of(dataset: Any) -> list[Any]:
    """Returns the iterables that a Hugging Face data set consists of, also if it is within another data set."""
    iterables: dict[int, Any] = {}
    waiting = [(dataset, False)]
    while waiting:
        candidate, is_iterable = waiting.pop()
        if id(candidate) in iterables or not hasattr(candidate, "__dict__"):
            continue
        iterables[id(candidate)] = candidate if is_iterable else None
        attributes = vars(candidate)
        waiting += [(value, False) for value in attributes.values() if isinstance(value, IterableDataset)]
        # Hugging Face: what its data sets, and its examples iterables, read from.
        inner = [attributes[name] for name in ("_ex_iterable", "ex_iterable") if name in attributes] + [
            *attributes.get("ex_iterables", ())
        ]
        waiting += [(value, True) for value in inner]
    return [candidate for candidate in iterables.values() if candidate is not None]
