"""Micro-batches hold each sample once, in order; what was made of them is put together again."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from polyphase.engine.strategies.pipeline.batches import batch_size_of, merged, split_batch


@dataclasses.dataclass
class Batch:
    x: Tensor
    names: list[str]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_parts_put_together_are_the_batch():
    rows = torch.arange(24).view(6, 4)
    batch = {
        "x": rows,
        "nested": [rows[:, 0], (rows[:, 1].float(),)],
        "texts": list("abcdef"),
        "scale": torch.tensor(2),
    }
    parts = split_batch(batch, 3)
    assert batch_size_of(batch) == 6
    assert [part["texts"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(part["scale"] == 2 for part in parts)
    assert torch.equal(torch.cat([part["x"] for part in parts]), rows)
    assert torch.equal(torch.cat([part["nested"][1][0] for part in parts]), rows[:, 1].float())


def test_dataclasses_and_named_tuples_keep_their_kind():
    rows = torch.arange(4)
    first, second = split_batch(Batch(rows, ["a"]), 2)
    assert isinstance(second, Batch)
    assert second.x.tolist() == [2, 3]
    assert first.names == ["a"]
    assert isinstance(split_batch(Pair(rows, rows), 2)[0], Pair)


def test_one_part_is_the_batch_itself():
    batch = object()
    assert split_batch(batch, 1)[0] is batch


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([None, None], None),
        ([torch.tensor(1.0), torch.tensor(3.0)], torch.tensor(2.0)),
        ([torch.tensor([1]), torch.tensor([2, 3])], torch.tensor([1, 2, 3])),
        ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
        ([{"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}], {"a": torch.tensor([1.0, 2.0])}),
        ([(torch.tensor([1]), "x"), (torch.tensor([2]), "x")], (torch.tensor([1, 2]), "x")),
        ([[torch.tensor([1])], [torch.tensor([2])]], [torch.tensor([1, 2])]),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ([1.0, 2.0], 1.5),
    ],
)
def test_outputs_become_those_of_the_whole_batch(outputs, expected):
    found = merged(outputs)
    assert type(found) is type(expected)
    assert str(found) == str(expected)


def test_named_outputs_keep_their_kind():
    found = merged([Pair(torch.zeros(1), torch.ones(1)), Pair(torch.zeros(2), torch.ones(2))])
    assert isinstance(found, Pair)
    assert len(found.y) == 3


def test_a_tensor_of_another_length_is_an_error():
    with pytest.raises(ValueError, match=r"each batch of 4 samples .* it has a tensor \[3\]"):
        split_batch([torch.zeros(4), torch.zeros(3)], 2)


def test_a_batch_without_tensors_is_an_error():
    with pytest.raises(ValueError, match="there is no tensor in this dict"):
        batch_size_of({"a": "b"})
