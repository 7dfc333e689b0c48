"""Which collective the ranks do not agree on, from what torch has recorded of each."""

import pytest

from polyphase.engine.reliability.flight_recorder import describe_differences, mismatches


def call(number, operation="all_reduce", sizes=((7,),), dtypes=("Float",), *, is_done=True, is_p2p=False):
    lists = [list(size) for size in sizes]
    return {
        "operation": operation,
        "number": number,
        "is_p2p": is_p2p,
        "group": "default_pg",
        "is_done": is_done,
        "input_sizes": lists,
        "output_sizes": lists,
        "input_dtypes": list(dtypes),
        "output_dtypes": list(dtypes),
    }


def rank(*calls):
    return {"calls": {"gloo 0": list(calls)}, "groups": {"0": [0, 1, 2]}}


def test_the_rank_that_has_not_come_is_named_with_its_last_call():
    there = rank(call(1, "broadcast"), call(2, is_done=False))
    assert describe_differences({0: there, 1: rank(call(1, "broadcast")), 2: there}) == [
        "ranks 0, 2 called all_reduce of Float [7], number 2 of group 'default_pg', which rank 1 did not; the last call"
        " of rank 1 there is broadcast of Float [7], number 1"
    ]


def test_nothing_is_said_where_all_agree():
    assert describe_differences({0: rank(call(1)), 1: rank(call(1)), 2: rank(call(1))}) == []
    assert describe_differences({0: None, 1: None}) == []
    assert describe_differences({0: rank(call(1, "send 0->1", is_done=False, is_p2p=True)), 1: None}) == []


def test_equal_calls_do_not_differ():
    """As torch has recorded an all_gather of FSDP2's: with the output of one rank."""
    calls = rank(call(1, "all_gather", sizes=[(8, 16)]))
    assert describe_differences({0: calls, 1: calls, 2: calls}) == []


def test_a_rank_of_which_nothing_is_known():
    there = rank(call(2, is_done=False))
    assert describe_differences({0: there, 1: there, 2: None}) == [
        "ranks 0-1 called all_reduce of Float [7], number 2 of group 'default_pg'; nothing is known of rank 2"
    ]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (call(2, sizes=[(8,)]), "sizes on rank 0 (all_reduce of Float [7]) than on rank 1 (all_reduce of Float [8])"),
        (
            call(2, dtypes=["Double"]),
            "types on rank 0 (all_reduce of Float [7]) than on rank 1 (all_reduce of Double [7])",
        ),
        (
            call(2, "broadcast"),
            "operations on rank 0 (all_reduce of Float [7]) than on rank 1 (broadcast of Float [7])",
        ),
    ],
)
def test_what_differs(other, differs):
    by_rank = {0: rank(call(1), call(2)), 1: rank(call(1), other)}
    assert mismatches(by_rank) == [f"number 2 of group 'default_pg' has other {differs}"]
    assert describe_differences(by_rank)[0] == mismatches(by_rank)[0]
