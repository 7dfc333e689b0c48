"""What ranks of `ps` say to each other comes back as it was, and nothing of it is run."""

import enum
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyphase.engine.checkpoint import CheckpointError
from polyphase.engine.reliability.heartbeat import Call
from polyphase.engine.strategies.ps.object_gather import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda each: (
        st.lists(each, max_size=3)
        | st.lists(each, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), each, max_size=3)
    ),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_values_come_back(value):
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    first, second = unpack(pack([tensor, {"x": tensor.T if tensor.dim() == 2 else tensor}]))
    assert first.dtype == dtype
    assert torch.equal(first, tensor)
    assert torch.equal(second["x"], tensor.T if tensor.dim() == 2 else tensor)
    first.add_(1) if dtype is not torch.bool else None  # it is not read-only


def test_other_values_come_back():
    values = [np.arange(6).reshape(2, 3), np.int64(3), Path("a/b"), torch.float16, {1, 2}, random.getstate()]
    found = unpack(pack(values))
    assert np.array_equal(found[0], values[0])
    assert found[1:] == values[1:]
    call = Call("m.", "f", "a.py", 3, False)
    assert unpack(pack(call)) == call


@pytest.mark.parametrize("error", [ValueError("wrong"), CheckpointError("damaged"), FileNotFoundError(2, "none")])
def test_exceptions_come_back(error):
    found = unpack(pack(error))
    assert type(found) is type(error)
    assert str(error) in str(found)


class Foreign:
    """Of a user's."""


class Shade(enum.Enum):
    DARK = 1


@pytest.mark.parametrize("value", [Foreign(), Shade.DARK, print, Foreign])
def test_objects_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"tensors and plain values only .* but got one of \w+.*turn it into those"):
        pack([value])


RAN: list[str] = []


class Bad:
    def __reduce__(self):
        return RAN.append, ("ran",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 50,
        pickle.dumps(Bad()),
        (2).to_bytes(8, "little") + b"{}",
        *(
            len(tree).to_bytes(8, "little") + tree
            for tree in (
                b'{"record": ["os", "system", ["command"], ["true"]]}',
                b'{"record": ["polyphase.engine.reliability.hard_exit", "hard_exit", ["code"], [0]]}',
                b'{"record": ["polyphase.engine.reliability.heartbeat", "Call", ["module"], ["m"]]}',
                b'{"tensor": ["float32", [1000000000], 4000000000]}',
                b'{"array": ["O", [1], 0]}',
                b'{"taken": 3}',
            )
        ),
    ],
    ids=range(10),
)
def test_garbage_is_an_error_and_nothing_of_it_is_run(content):
    with pytest.raises(ValueError, match="these bytes are no plain values"):
        unpack(content)
    assert not RAN


def test_an_error_of_an_unknown_class_keeps_its_text():
    found = unpack(pack(ValueError("wrong")).replace(b'"ValueError"', b'"VagueError"'))
    assert (type(found), str(found)) == (RuntimeError, "VagueError: wrong")
