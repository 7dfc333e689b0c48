"""Streams whose state is incomplete: it leaves out the examples in a shuffle buffer.

Hugging Face's `IterableDataset.shuffle` reads ahead into a buffer, and its `state_dict` counts what is in there as
read. A pass over it depends on its epoch and on the states of its generators alone, so such a stream is read again from
the start of the epoch up to its place. That takes the time of reading it, and is exact.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from .copied import copied
from .stand_in import StandIn
from .stateful import is_hugging_faces, is_stateful

__all__ = ["Replayed", "digest_of_generators", "loses_its_buffer", "replayed"]


class Replayed(StandIn):
    """A data set of Hugging Face's without its `state_dict`; `StatefulDataLoader` then reads it up to its place."""

    _lacks = ("state_dict", "load_state_dict")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def replayed(loader: DataLoader) -> DataLoader:
    """`loader`; a copy that reads its stream up to its place if that is Hugging Face's, with a shuffle buffer."""
    dataset: Any = loader.dataset
    # Another class that has one within may have more of a state.
    if is_hugging_faces(dataset) and loses_its_buffer(dataset):
        return copied(loader, dataset=Replayed(dataset))
    return loader


def loses_its_buffer(dataset: Any) -> bool:
    """Whether a data set has a state that leaves out examples in a shuffle buffer."""
    # Hugging Face: BufferShuffledExamplesIterable
    names = {cls.__name__ for part in _iterables(dataset) for cls in type(part).__mro__}
    return is_stateful(dataset) and "BufferShuffledExamplesIterable" in names


def digest_of_generators(dataset: Any) -> int | None:
    """A checksum of the generators that the order of a Hugging Face data set is drawn from; None without any."""
    values = [value for part in _iterables(dataset) for value in vars(part).values()]
    states = [repr(value.bit_generator.state) for value in values if isinstance(value, np.random.Generator)]
    return zlib.crc32("".join(states).encode()) if states else None


def _iterables(dataset: Any) -> list[Any]:
    """The iterables that a Hugging Face data set, or one within another data set, is made of."""
    found: dict[int, Any] = {}
    waiting = [(dataset, False)]
    while waiting:
        part, is_iterable = waiting.pop()
        if id(part) in found or not hasattr(part, "__dict__"):
            continue
        found[id(part)] = part if is_iterable else None
        own = vars(part)
        waiting += [(value, False) for value in own.values() if isinstance(value, IterableDataset)]
        # Hugging Face: what its data sets, and its examples iterables, read from.
        inner = [own[name] for name in ("_ex_iterable", "ex_iterable") if name in own] + [*own.get("ex_iterables", ())]
        waiting += [(value, True) for value in inner]
    return [part for part in found.values() if part is not None]
