"""Stores an order of samples in 8 bytes a number, and yields the items as the user's sampler has yielded them.

In a list, a Python or NumPy integer takes 40 bytes, and a tensor of one number 400.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["CompactOrder"]

_Kind = tuple[bool, Any]
"""Whether the items are lists, and the type of their numbers; None if they are not all numbers of one type."""


class CompactOrder:
    """Items of one kind: NumPy's integers, tensors of one int64, or lists of these or of integers."""

    def __init__(self) -> None:
        self._kind: _Kind | None = None
        self._numbers = array("q")
        self._ends = array("q")
        """The position after the last number of each list."""

    def fits(self, items: list[Any]) -> bool:
        """Whether `items` are of the kind of those before; the first ones decide."""
        kind = _kind_of(items)
        return kind[1] is not None and self._kind in (None, kind)

    def extend(self, items: list[Any]) -> None:
        """Adds items that fit."""
        self._kind = are_lists, kind = _kind_of(items)
        for numbers in items if are_lists else [items]:
            self._numbers.extend(torch.stack(numbers).tolist() if kind is torch.Tensor and numbers else numbers)
            if are_lists:
                self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends if self._are_lists else self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self._list(at) if self._are_lists else self._read(at, at + 1)[0]
        start, stop, _ = index.indices(len(self))
        return [self._list(at) for at in range(start, stop)] if self._are_lists else self._read(start, stop)

    @property
    def _are_lists(self) -> bool:
        return self._kind is not None and self._kind[0]

    def _list(self, at: int) -> list[Any]:
        return self._read(self._ends[at - 1] if at else 0, self._ends[at])

    def _read(self, start: int, stop: int) -> list[Any]:
        numbers = self._numbers[start:stop].tolist()
        assert self._kind is not None
        kind = self._kind[1]
        if kind is int:
            return numbers
        return [torch.tensor(number) for number in numbers] if kind is torch.Tensor else list(map(kind, numbers))


def _kind_of(items: list[Any]) -> _Kind:
    are_lists = set(map(type, items)) == {list}
    numbers: Iterable[Any] = [number for item in items for number in item] if are_lists else items
    kinds = set(map(type, numbers)) or {int}
    kind = kinds.pop()
    if kinds or not _is_kept(kind, numbers) or (kind is int and not are_lists):
        return are_lists, None
    return are_lists, kind


def _is_kept(kind: type, numbers: Iterable[Any]) -> bool:
    if kind is torch.Tensor:
        return all(
            number.dtype is torch.int64 and number.dim() == 0 and number.device.type == "cpu" for number in numbers
        )
    return kind is int or (issubclass(kind, np.integer) and kind is not np.uint64)
