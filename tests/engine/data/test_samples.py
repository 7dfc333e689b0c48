"""The samples of a batch of any kind: how many there are, each once in the parts, and all of them in the whole."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from polyphase.engine.data.samples import NoSamplesError, join_batches, num_samples, take_samples


@dataclasses.dataclass
class Texts:
    texts: list[str]
    language: str = "en"
    weight: float = 1.0


@dataclasses.dataclass
class Record:
    values: list[float]


class Pair(NamedTuple):
    x: Any
    y: Any


class Unknown:
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts


X, ABCD = torch.arange(8.0).view(4, 2), list("abcd")
BATCHES = [
    X,
    ABCD,
    {"text": ABCD, "lang": "en"},
    Texts(ABCD),
    [Record([1.0, 2.0]) for _ in range(4)],
    [{"image": torch.zeros(3, 2, 2), "name": name} for name in ABCD],
    {"ids": [1, 2, 3, 4], "scale": 2.5},
    [X, tuple(ABCD)],
    Pair(X.numpy(), [torch.zeros(n) for n in range(4)]),
    {"nested": {"texts": ABCD}, "shape": (224, 224), "step": torch.tensor(3)},
]


@pytest.mark.parametrize("batch", BATCHES)
def test_parts_joined_are_the_batch(batch):
    assert num_samples(batch) == 4
    parts = [take_samples(batch, 4, slice(1)), take_samples(batch, 4, slice(1, None))]
    assert [num_samples(part) for part in parts] == [1, 3]
    assert_same(join_batches(parts, [1, 3]), batch)


def test_every_second_sample_is_a_part():
    assert take_samples({"x": X, "text": ABCD}, 4, slice(1, None, 2))["text"] == ["b", "d"]


@pytest.mark.parametrize("batch", [[("a", "b"), ("c", "d"), ("e", "f")], {}, {"a": ["x"], "b": ["x", "y"]}, 7, "text"])
def test_a_number_that_does_not_show_is_unknown(batch):
    assert num_samples(batch) is None


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ({"x": X, "ids": [1, 2]}, "a list of 2 values"),
        ([X, Unknown(ABCD)], "a Unknown, whose values it can't cut"),
        ([("a", "b"), ("c", "d")], "a list of 2 lists of 2 values"),
        ({"x": X, "y": torch.zeros(3)}, r"a tensor \[3\]"),
    ],
)
def test_what_can_not_be_cut_is_named(batch, part):
    with pytest.raises(NoSamplesError, match=part):
        take_samples(batch, num_samples(batch) or 2, slice(1))


@pytest.mark.parametrize(
    ("batches", "part"),
    [
        ([{"x": X, "n": 4}, {"x": X, "n": 5}], "a int, which the samples do not share"),
        ([{"x": X}, {"y": X}], "a dict with other keys"),
        ([X, X[:3]], r"a tensor \[4, 2\]"),
        ([[X, torch.tensor(1)], [X, torch.tensor(2)]], "a tensor without dims, which differs"),
    ],
)
def test_what_can_not_be_joined_is_named(batches, part):
    with pytest.raises(NoSamplesError, match=part):
        join_batches(batches, [4, 4])


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, (Tensor, np.ndarray)):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
