"""Micro-batches hold each sample once, in order; what was made of them is put together again."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from polyphase.engine.strategies.pipeline.micro_batches import batch_size_of, merge_outputs, split_batch


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


def test_containers_keep_their_kind_and_are_cut_too():
    rows = torch.arange(4)
    first, second = split_batch(Batch(rows, list("abcd")), 2)
    assert isinstance(second, Batch)
    assert second.x.tolist() == [2, 3]
    assert (first.names, second.names) == (["a", "b"], ["c", "d"])
    assert isinstance(split_batch(Pair(rows, rows), 2)[0], Pair)
    batch = UserDict(x=rows, more=OrderedDict(ids=[[1], [2, 3], [], [4]], infos=[{"name": n} for n in "abcd"]))
    part = split_batch(batch, 2)[1]
    assert (type(part), type(part["more"])) == (UserDict, OrderedDict)
    assert part["more"] == {"ids": [[], [4]], "infos": [{"name": "c"}, {"name": "d"}]}
    assert len(batch["more"]["ids"]) == 4


def test_arrays_and_tuples_of_values_for_each_sample_are_cut_and_what_all_share_is_not():
    part = split_batch([torch.arange(4), np.arange(4), (1, 2, 3, 4), (224, 224), 7, "text", None, {1}], 4)[2]
    assert [part[0].tolist(), part[1].tolist(), *part[2:]] == [[2], [2], (3,), (224, 224), 7, "text", None, {1}]


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
    found = merge_outputs(outputs)
    assert type(found) is type(expected)
    assert str(found) == str(expected)


def test_named_outputs_keep_their_kind():
    found = merge_outputs([Pair(torch.zeros(1), torch.ones(1)), Pair(torch.zeros(2), torch.ones(2))])
    assert isinstance(found, Pair)
    assert len(found.y) == 3


class Graph:
    def __init__(self) -> None:
        self.nodes = torch.zeros(9, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3), r"a tensor \[3\]"),
        (np.zeros((3, 2)), r"a tensor \[3, 2\]"),
        ([torch.zeros(3), torch.zeros(2)], r"a tensor \[3\]"),
        (list("abcdefgh"), "a list of 8 values"),
        ([[1, 2], [3]], "a list of 2 values"),
        (Graph(), "a Graph, whose tensors it can't cut"),
    ],
)
def test_what_has_another_length_is_an_error(other, message):
    with pytest.raises(ValueError, match=rf"each batch of 4 samples .* it has {message}.*schedule=gpipe"):
        split_batch({"x": torch.zeros(4), "other": other}, 2)


def test_a_batch_without_tensors_is_an_error():
    with pytest.raises(ValueError, match="the number of samples does not show in this dict"):
        batch_size_of({"a": "b"})
