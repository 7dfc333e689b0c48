"""How many samples a batch has, as the ranks tell each other before each batch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from polyphase.engine.data.clone_loader import clone_loader
from polyphase.engine.data.uneven import UnevenTrainLoader


class Three(IterableDataset[Any]):
    """Three samples, made of numbers."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(3))


def sizes_of(make: Callable[[int], Any], **arguments: Any) -> list[int]:
    said: list[int] = []

    def say(size: int) -> list[int]:
        said.append(size)
        return [size]

    loader = DataLoader(Three(make), **arguments)
    of_rank = {"policy": "pad", "lengths": [None], "rank": 0, "num_done": lambda: 0}
    list(clone_loader(loader, UnevenTrainLoader, all_gather_ints=say, **of_rank))
    return said[:-1]  # then that there are no more


@pytest.mark.parametrize(
    "make",
    [
        str,
        lambda i: str(i).encode(),
        lambda i: {"text": "word " * i},
        lambda i: (str(i), "name"),
        lambda i: {"texts": ["a", "b", "c", str(i)]},
        lambda i: {"text": str(i), "label": i},
        lambda i: (str(i), torch.zeros(5)),
    ],
)
def test_strings_count_as_tensors_do(make):
    assert sizes_of(make, batch_size=2) == [2, 1]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (str, {"batch_size": None}),
        (str, {"batch_size": 2, "collate_fn": lambda words: {"text": words, "names": ["a", "b", "c"]}}),
        (lambda i: {}, {"batch_size": 2}),
    ],
)
def test_what_is_not_torchs_is_not_guessed(make, arguments):
    assert set(sizes_of(make, **arguments)) == {-2}
