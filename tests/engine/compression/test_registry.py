"""From a compression flag to its comm hook, and every way of getting it wrong."""

import re

import pytest

from polyphase.engine.compression import COMM_HOOKS, CommHook, make_comm_hook
from polyphase.engine.compression.powersgd import PowerSGD


def test_none_is_no_hook():
    assert make_comm_hook("none") is None


@pytest.mark.parametrize("name", list(COMM_HOOKS))
def test_each_name_makes_its_hook_with_nothing_counted_yet(name):
    hook = make_comm_hook(name)
    assert type(hook) is COMM_HOOKS[name]
    assert isinstance(hook, CommHook)
    assert hook.name == name
    assert hook.description
    assert (hook.num_calls, hook.num_bytes) == (0, 0)


def test_two_hooks_share_nothing():
    assert make_comm_hook("fp16") is not make_comm_hook("fp16")


@pytest.mark.parametrize(
    ("flag", "rank", "start"),
    [
        ("powersgd", 4, 10),
        ("powersgd:2", 2, 10),
        ("powersgd:rank=2", 2, 10),
        ("powersgd:start=2", 4, 2),
        ("powersgd:2,start=100", 2, 100),
        ("powersgd:start=100,rank=2", 2, 100),
    ],
)
def test_powersgds_options(flag, rank, start):
    hook = make_comm_hook(flag)
    assert isinstance(hook, PowerSGD)
    assert (hook.rank, hook.start) == (rank, start)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("powersdg", "unknown compression 'powersdg'. Did you mean 'powersgd'? Allowed: bf16, fp16, none, powersgd."),
        ("zip", "unknown compression 'zip'. Allowed: bf16, fp16, none, powersgd."),
        ("", "the flag '' has no name"),
        ("powersgd:rnak=2", "unknown option of compression 'powersgd' 'rnak'. Did you mean 'rank'?"),
        ("fp16:rank=2", "unknown option of compression 'fp16' 'rank'."),
        ("none:rank=2", "unknown option of compression 'none' 'rank'."),
        ("fp16:2", "compression 'fp16' can't take the value '2'; remove it from 'fp16:2'."),
        ("none:2", "compression 'none' can't take the value '2'; remove it from 'none:2'."),
        ("powersgd:2,rank=3", "compression 'powersgd' can't take the value '2'; remove it from 'powersgd:2,rank=3'."),
        ("powersgd:0", "compression powersgd:rank must be a whole number of at least 1, but got 0."),
        ("powersgd:-1", "compression powersgd:rank must be a whole number of at least 1, but got -1."),
        ("powersgd:1.5", "compression powersgd:rank must be a whole number of at least 1, but got '1.5'."),
        ("powersgd:--1", "compression powersgd:rank must be a whole number of at least 1, but got '--1'."),
        ("powersgd:²", "compression powersgd:rank must be a whole number of at least 1, but got '²'."),
        ("powersgd:start=two", "compression powersgd:start must be a whole number of at least 1, but got 'two'."),
        ("powersgd:start=1", "powersgd:start must be a whole number of at least 2, but got 1."),
    ],
)
def test_a_flag_that_cannot_be_honoured_says_why(flag, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_comm_hook(flag)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"rank": 0}, "the rank of powersgd must be"), ({"start": 1}, "powersgd:start must be")]
)
def test_powersgd_checks_its_arguments_itself_as_well(arguments, message):
    with pytest.raises(ValueError, match=message):
        PowerSGD(**arguments)
