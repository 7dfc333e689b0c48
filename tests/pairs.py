"""Parts of products of parameters for `make test`; the rest of each is for `make nightly`."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def paired(*axes: Iterable[Sequence[Any] | Any]) -> list[Any]:
    """The product of the axes, whose cells are nightly but for some that have each pair of values of two axes.

    A value that is a tuple is several arguments.
    """
    cells = list(product(*map(tuple, axes)))
    missing = {pair for cell in cells for pair in _pairs(cell)}
    kept = []
    while missing:
        best = max(cells, key=lambda cell: len(missing.intersection(_pairs(cell))))
        kept.append(best)
        missing.difference_update(_pairs(best))
    return [_cell(cell, cell in kept) for cell in cells]


def alternating(first: Iterable[Sequence[Any] | Any], second: Iterable[Sequence[Any] | Any]) -> list[Any]:
    """The product of two axes, every second cell of which is nightly: each value is left with half of the others."""
    return [
        _cell((one, other), (number + index) % 2 == 0)
        for number, one in enumerate(first)
        for index, other in enumerate(second)
    ]


def nightly(*values: Sequence[Any] | Any) -> list[Any]:
    """Values of a parameter that `make test` leaves to `make nightly`; a tuple is several arguments."""
    return [_cell((value,), False) for value in values]


def _pairs(cell: tuple[Any, ...]) -> set[Any]:
    return {(i, repr(cell[i]), j, repr(cell[j])) for i, j in combinations(range(len(cell)), 2)}


def _cell(cell: tuple[Any, ...], is_kept: bool) -> Any:
    values = [value for part in cell for value in (part if isinstance(part, tuple) else (part,))]
    return pytest.param(*values, marks=[] if is_kept else pytest.mark.nightly)
