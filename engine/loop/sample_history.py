"""Finds out whether a sample depends on what was read before it, as by a counter in `__getitem__` or in `collate_fn`.

Each of several ranks reads its part of the samples, so such a counter is behind that of one process. Looked at are the
plain values (numbers, texts, small tensors and arrays) that the data set and `collate_fn` can reach: attributes and
containers of theirs and of their parts, and what their own code names. If the first batches have changed some, one
sample is read with the values of before, with those of now, and with those of before once more, each time with the same
random states; then all is put back. Caches, and counts that are only shown, change no sample.
"""

import contextlib
import sys
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from .._compat.torch import tree_leaves
from ..data.own_generators import OwnGenerators, searched_parts, set_state_here
from ..reliability.tracebacks import is_installed
from ..strategies.pipeline.reachable_state import Code

__all__ = ["SampleHistory"]

_MOST_VALUES = 10_000
"""Larger tensors and arrays are data."""
_MOST_ITEMS = 64
"""Longer containers are data."""
_NOTHING: Any = object()


class _Table(NamedTuple):
    """Names and values that can be read and set."""

    owner: str
    values: MutableMapping[Any, Any]
    name: Any = None
    """The one name that counts; None: all."""


class SampleHistory:
    """The values that the samples of a loader may depend on, before its first batch is read.

    Args:
        loader: a loader of a data set with indices, whose samples this process reads itself.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._readers = loader.dataset, loader.collate_fn
        self._tables = _tables(self._readers)
        self._before = self._values()

    def decisive(self, index: Any) -> str:
        """Returns the names of the changed values if the sample of an index depends on them; else "".

        Args:
            index: that of a sample that was not read yet, if there is one: caches have nothing of it.
        """
        before, now = self._before, self._values()
        changed = {key for key in before.keys() | now.keys() if not _is_same(before.get(key), now.get(key))}
        if not changed:
            return ""
        random = OwnGenerators(self._readers).here().plain()
        samples: list[Any] = []
        try:
            with contextlib.suppress(Exception):  # what raises an error only here is no evidence
                for values in (before, now, before):
                    self._put(values, changed)
                    set_state_here(self._readers, random)
                    samples.append(self._read(index))
        finally:
            self._put(now, changed)
            set_state_here(self._readers, random)
        if len(samples) < 3 or _is_same(samples[0], samples[1]) or not _is_same(samples[0], samples[2]):
            return ""
        return " and ".join(sorted({f"{name!r} of {self._tables[number].owner}" for number, name in changed}))

    def _read(self, index: Any) -> Any:
        data: Any = self._loader.dataset
        collate: Any = self._loader.collate_fn
        if not self._loader._auto_collation:  # torch: batch_size=None
            return collate(data[index])
        indices = index if isinstance(index, list) else [index]
        several = getattr(data, "__getitems__", None)
        return collate(several(indices) if several else [data[i] for i in indices])

    def _values(self) -> dict[tuple[int, Any], Any]:
        values = {}
        for number, table in enumerate(self._tables):
            names = list(table.values) if table.name is None else [table.name]
            kept = ((name, _kept(table.values.get(name, _NOTHING))) for name in names)
            values.update({(number, name): value for name, value in kept if value is not _NOTHING})
        return values

    def _put(self, values: dict[tuple[int, Any], Any], keys: set[tuple[int, Any]]) -> None:
        for number, name in keys:
            table = self._tables[number].values
            if (number, name) in values:
                value, present = _kept(values[number, name]), table.get(name)
                if isinstance(value, list) and isinstance(present, list):
                    present[:] = value
                else:
                    table[name] = value
            else:
                table.pop(name, None)


def _tables(readers: tuple[Any, ...]) -> list[_Table]:
    code, tables = Code(), []
    for part in (*readers, *searched_parts(readers)):
        kind = part if callable(part) and hasattr(part, "__code__") else type(part)
        if not is_installed(getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or ""):
            code.follow(part if kind is part else kind)
    named = [_Table(place.owner, table, place.name) for place, table in code.tables.items()]
    values = [table.values[table.name] for table in named if table.name in table.values]
    for part in (*searched_parts(readers), *searched_parts(values)):
        if isinstance(part, dict):
            if len(part) <= _MOST_ITEMS:
                tables.append(_Table("a dict", part))
        elif isinstance(getattr(part, "__dict__", None), dict):
            tables.append(_Table(type(part).__name__, vars(part)))
    return [*tables, *named]


def _kept(value: Any) -> Any:
    """Returns a copy of a plain value, or of a list of some; `_NOTHING` for anything else."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _MOST_VALUES else _NOTHING
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _MOST_VALUES and not value.dtype.hasobject else _NOTHING
    if type(value) is list and len(value) <= _MOST_ITEMS:
        items = [_NOTHING if isinstance(item, list) else _kept(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in items) else items
    return _NOTHING


def _is_same(value: Any, other: Any) -> bool:
    leaves, others = tree_leaves(value), tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and bool(value.eq(other).all())
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(value, other)
    return type(value) is type(other) and (value is other or bool(value == other))
