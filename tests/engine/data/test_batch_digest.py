"""What the checksum of batches depends on."""

import numpy as np
import pytest
import torch

from polyphase.engine.data.stream_loader import add_to_digest

BATCHES = {
    "integers": (torch.arange(6), torch.arange(1, 7)),
    "the shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "the type": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "booleans": (torch.tensor([True, False]), torch.tensor([False, True])),
    "a scalar": (torch.tensor(1.0), torch.tensor(2.0)),
    "a transposed tensor": (torch.arange(6).view(2, 3).T, torch.arange(6).view(3, 2)),
    "a large tensor": (torch.arange(9999), torch.arange(9999) * 2),
    "strings": (["a", "b"], ["b", "a"]),
    "bytes": (b"ab", b"ba"),
    "a number within": ({"id": [1, (2, 3)]}, {"id": [1, (2, 4)]}),
    "a key": ({"a": 1}, {"b": 1}),
    "an array": (np.arange(4), np.arange(4) + 1),
    "an array of strings": (np.array(["a", "b"]), np.array(["a", "c"])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_other_batches_have_another_checksum_and_the_same_have_the_same(name):
    one, other = BATCHES[name]
    assert add_to_digest(0, one) == add_to_digest(0, one)
    assert add_to_digest(0, one) != add_to_digest(0, other)


def test_it_depends_on_the_order_of_batches():
    one, other = torch.tensor([1]), torch.tensor([2])
    assert add_to_digest(add_to_digest(0, one), other) != add_to_digest(add_to_digest(0, other), one)


def test_of_what_it_cannot_look_into_it_takes_the_type_alone():
    one, other = object(), object()
    assert add_to_digest(0, [one, None, torch.empty(0)]) == add_to_digest(0, [other, None, torch.empty(0)])
    assert add_to_digest(0, np.array([one], dtype=object)) == add_to_digest(0, np.array([other], dtype=object))
