"""The flags' grammar: what is read, and every way of getting it wrong."""

import dataclasses
import itertools
import math
from typing import Literal

import pytest

from polyphase.engine.flags import (
    LAUNCHERS,
    Flag,
    Layout,
    check_count,
    choose,
    parse_flag,
    parse_options,
    split_launcher,
)

AXES = ("pp", "replicate", "shard", "tp", "cp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    switch: bool = False
    count: int = 1
    ratio: float = 0.5
    size: int | None = None
    word: Literal["here", "there"] = "here"
    text: str = ""


# --- Layout


def test_an_empty_layout_is_one_device():
    assert Layout().world_size == 1
    assert str(Layout()) == "one device"
    assert tuple(Layout().axes) == AXES


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), repeat=5)))
def test_the_world_is_the_product_of_the_axes(sizes):
    layout = Layout(**dict(zip(AXES, sizes, strict=True)))
    assert layout.world_size == math.prod(sizes)
    assert tuple(layout.axes.values()) == sizes


def test_a_layout_prints_the_axes_that_are_used_outermost_first():
    assert str(Layout(tp=2, replicate=4)) == "replicate=4 x tp=2"


def test_a_layout_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout().shard = 2  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_has_a_whole_size_of_at_least_one(axis, size):
    with pytest.raises(ValueError, match=rf"the size of axis '{axis}' must be a whole number of at least 1"):
        Layout(**{axis: size})


# --- Layout.derive


@pytest.mark.parametrize("rest", AXES)
@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_without_sizes_one_axis_takes_all_processes(world_size, rest):
    assert Layout.derive(world_size, rest=rest) == Layout(**{rest: world_size})


@pytest.mark.parametrize(("replicate", "shard"), list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_a_size_left_out_is_derived_from_the_others(replicate, shard):
    whole = Layout(replicate=replicate, shard=shard)
    world_size = replicate * shard
    assert Layout.derive(world_size, rest="shard", replicate=replicate) == whole
    assert Layout.derive(world_size, rest="replicate", shard=shard) == whole
    assert Layout.derive(world_size, rest="shard", replicate=replicate, shard=None) == whole
    assert Layout.derive(world_size, rest="shard", replicate=replicate, shard=shard) == whole


@pytest.mark.parametrize("world_size", [1, 3, 5, 8])
def test_sizes_that_do_not_multiply_to_the_world_print_the_whole_product(world_size):
    with pytest.raises(ValueError, match=rf"replicate=2 x shard=3 = 6 does not fit {world_size} process\(es\)"):
        Layout.derive(world_size, rest="shard", replicate=2, shard=3)


def test_sizes_that_leave_a_fraction_of_a_process_are_refused():
    with pytest.raises(ValueError, match=r"replicate=3 = 3 does not fit 4 process\(es\).*`devices` and `num_nodes`"):
        Layout.derive(4, rest="shard", replicate=3)


def test_the_remedy_is_to_leave_a_size_out_only_where_one_was_given():
    with pytest.raises(ValueError, match="leave out 'shard' to have it derived"):
        Layout.derive(8, rest="shard", replicate=2, shard=3)
    with pytest.raises(ValueError, match="does not fit 4") as refused:
        Layout.derive(4, rest="shard", replicate=3, shard=None)
    assert "leave out" not in str(refused.value)


@pytest.mark.parametrize("size", [0, -2, True])
def test_a_given_size_is_checked_before_it_is_multiplied(size):
    with pytest.raises(ValueError, match="the size of axis 'replicate' must be a whole number"):
        Layout.derive(4, rest="shard", replicate=size)


# --- choose and check_count


@pytest.mark.parametrize("allowed", [["fsdp", "ddp"], ("fsdp", "ddp"), {"fsdp": 1, "ddp": 2}])
def test_what_is_allowed_is_returned(allowed):
    assert choose("strategy", "fsdp", allowed) == "fsdp"


def test_a_near_miss_is_answered_with_the_closest_match_and_all_names_in_order():
    with pytest.raises(ValueError, match=r"unknown strategy 'fdsp'\. Did you mean 'fsdp'\? Allowed: ddp, fsdp\.$"):
        choose("strategy", "fdsp", ["fsdp", "ddp"])


def test_the_closest_match_ignores_case():
    with pytest.raises(ValueError, match=r"Did you mean 'ddp'\?"):
        choose("strategy", "DDP", ["fsdp", "ddp"])


def test_without_a_near_name_none_is_suggested():
    with pytest.raises(ValueError, match=r"^unknown strategy 'zzzzzz'\. Allowed: ddp, fsdp\.$"):
        choose("strategy", "zzzzzz", ["fsdp", "ddp"])


@pytest.mark.parametrize("given", [None, 3, True])
def test_a_value_of_another_type_is_refused_by_the_same_words(given):
    with pytest.raises(ValueError, match=rf"unknown strategy {given!r}\."):
        choose("strategy", given, ["fsdp", "ddp"])


@pytest.mark.parametrize(("value", "least"), [(1, 1), (7, 1), (0, 0), (2, 2)])
def test_a_count_is_returned(value, least):
    assert check_count("steps", value, least=least) == value


@pytest.mark.parametrize(("value", "least"), [(0, 1), (-1, 1), (1, 2), (1.0, 1), ("1", 1), (True, 1), (None, 1)])
def test_what_is_no_count_is_refused(value, least):
    with pytest.raises(ValueError, match=rf"^steps must be a whole number of at least {least}, but got {value!r}\.$"):
        check_count("steps", value, least=least)


# --- parse_flag


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("ddp", Flag(name="ddp")),
        ("  ddp  ", Flag(name="ddp")),
        ("ddp:", Flag(name="ddp")),
        ("powersgd:2", Flag(name="powersgd", value="2")),
        ("powersgd:2,start=100", Flag(name="powersgd", value="2", options={"start": "100"})),
        ("hsdp:replicate=2,shard=4", Flag(name="hsdp", options={"replicate": "2", "shard": "4"})),
        ("hsdp: replicate = 2 , shard = 4 ,", Flag(name="hsdp", options={"replicate": "2", "shard": "4"})),
        ("x:path=a:b", Flag(name="x", options={"path": "a:b"})),
        ("x:equation=a=b", Flag(name="x", options={"equation": "a=b"})),
    ],
)
def test_a_flag_is_taken_apart(text, flag):
    assert parse_flag(text) == flag


@pytest.mark.parametrize("text", ["", "  ", ":a=1", " :a=1"])
def test_a_flag_needs_a_name(text):
    with pytest.raises(ValueError, match=r"has no name; write name or name:key=value"):
        parse_flag(text)


@pytest.mark.parametrize(
    ("text", "part"), [("x:a=", "a="), ("x:=1", "=1"), ("x:1,2", "2"), ("x:a=1,2", "2"), ("x:=", "=")]
)
def test_an_argument_without_key_or_value_is_refused(text, part):
    with pytest.raises(ValueError, match=rf"can't read '{part}' in the flag '{text}'; write name:key=value,key=value"):
        parse_flag(text)


def test_a_key_stands_once():
    with pytest.raises(ValueError, match=r"'a' stands twice in the flag 'x:a=1,a=1'; give it once"):
        parse_flag("x:a=1,a=1")


# --- split_launcher


@pytest.mark.parametrize("name", ["ddp", "fsdp", "local_sgd", "fsdp+tp"])
@pytest.mark.parametrize("suffix", list(LAUNCHERS))
def test_a_launcher_is_the_last_part_of_a_name(name, suffix):
    assert split_launcher(f"{name}_{suffix}" if suffix else name) == (name, suffix)


@pytest.mark.parametrize("name", ["spawn", "ddpspawn", "spawn_ddp"])
def test_a_name_that_only_contains_a_suffix_is_left_whole(name):
    assert split_launcher(name) == (name, "")


# --- parse_options


def test_texts_become_the_types_of_their_fields():
    texts = {"switch": "yes", "count": "3", "ratio": "1e-2", "size": "4", "word": "there", "text": "a b"}
    options = parse_options("strategy 'x'", Options, texts)
    assert options == Options(switch=True, count=3, ratio=0.01, size=4, word="there", text="a b")
    assert [type(value) for value in dataclasses.astuple(options)] == [bool, int, float, int, str, str]


def test_what_is_left_out_keeps_its_default():
    assert parse_options("strategy 'x'", Options, {}) == Options()


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("true", "True", "YES", "on", "1")]
    + [(text, False) for text in ("false", "False", "NO", "off", "0")],
)
def test_a_switch_is_read_in_any_of_its_spellings(text, value):
    assert parse_options("strategy 'x'", Options, {"switch": text}).switch is value


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("switch", "maybe", "x:switch must be true or false, but got 'maybe'"),
        ("count", "1.5", "x:count must be a whole number, but got '1.5'"),
        ("size", "none", "x:size must be a whole number, but got 'none'"),
        ("ratio", "half", "x:ratio must be a number, but got 'half'"),
        ("word", "their", r"unknown value of x:word 'their'\. Did you mean 'there'\? Allowed: here, there"),
        ("cuont", "1", r"unknown option of x 'cuont'\. Did you mean 'count'\? Allowed: count, ratio, size, switch"),
    ],
)
def test_an_option_that_cannot_be_read_says_what_it_must_be(key, text, message):
    with pytest.raises(ValueError, match=message):
        parse_options("x", Options, {key: text})
