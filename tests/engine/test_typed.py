"""A value of a file has exactly its declared type, and the first part that has not is named."""

from collections import OrderedDict
from typing import Annotated, Any, Literal, TypedDict

import pytest

from polyphase.engine.foreign import Count, Range, problem


class Inner(TypedDict):
    n: Count


class Outer(Inner, total=False):
    rows: list[tuple[int, str]]
    kind: Literal["a", 1] | None


@pytest.mark.parametrize(
    ("value", "expected", "says"),
    [
        (True, int, "it is True in place of int"),
        (-1, Count, "it is -1"),
        (1 << 70, Count, "it is a value of type int"),
        (float("nan"), Annotated[float, Range(0)], "it is nan"),
        ({}, Inner, "it has no n"),
        ({"n": 1, "rows": [(1, 2)]}, Outer, "it.rows[0][1] is 2 in place of str"),
        ({"n": 1, "rows": [(1,)]}, Outer, "it.rows[0] has 1 parts in place of 2"),
        ({"n": 1, "kind": "b"}, Outer, "it.kind is 'b' in place of 'a' or 1"),
        ({"n": 1, "kind": []}, Outer, "it.kind is a value of type list in place of str or None"),
        ({1: 2}, dict[str, Any], "a key of it is 1 in place of str"),
        ([0, None], list[bytes | int], "it[1] is None in place of bytes or int"),
    ],
)
def test_what_is_wrong_is_named(value, expected, says):
    assert problem(value, expected, "it") == says


def test_what_is_right_passes_with_further_keys():
    assert problem(OrderedDict(n=1, kind=None, rows=[(1, "x")], more=object()), Outer, "it") is None


def test_a_shared_value_is_looked_at_once():
    row: list[Any] = [1] * 1000
    assert problem([[row] * 1000] * 1000, list[list[list[int]]], "it") is None  # 10^9 values, if looked at one by one
