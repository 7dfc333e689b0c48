"""Taking a checkpoint apart and joining it again changes nothing."""

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polyphase.engine.checkpoint import NAMES, by_name, by_number, to_lightning
from polyphase.engine.checkpoint.state_tree import join, like, merged, split, tensor_keys

from .sample_checkpoints import LARGE, content, same

# Keys with dots and numbers as keys: their paths meet those of nested dicts.
KEYS = st.sampled_from(["a", "b", "a.b", "0", "0.a", 0, 1])
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.builds(torch.tensor, st.lists(st.floats(-9, 9), max_size=3)),
    st.builds(lambda value: torch.full((LARGE,), float(value)), st.integers(0, 9)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)
CHECKPOINTS = st.dictionaries(st.sampled_from(["state_dict", "optimizer_states", "callbacks", "mine"]), TREES)


@settings(max_examples=200)
@given(CHECKPOINTS)
def test_taking_apart_and_joining_changes_nothing(checkpoint):
    tensors, rest = split(checkpoint, "rank1.")
    joined = join(rest, tensors)
    assert same(joined, checkpoint)
    assert types(joined) == types(checkpoint)
    assert sorted(tensor_keys(rest)) == sorted(tensors)
    assert all(key.startswith("rank1.") for key in tensors)


def types(tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree), [types(value) for value in tree.values()]
    return (type(tree), [types(each) for each in tree]) if isinstance(tree, (list, tuple)) else type(tree)


def test_weights_optimizer_state_and_large_tensors_are_taken_out_by_readable_keys():
    tensors, rest = split(content(3))
    assert set(tensors) == {
        *("state_dict.net.weight", "state_dict.net.bias", "callbacks.Average.large"),
        *("optimizer_states.0.state.net.weight.step", "optimizer_states.0.state.net.weight.exp_avg"),
    }
    assert torch.equal(rest["callbacks"]["Average"]["small"], torch.tensor(3))


def test_the_tensors_are_the_ones_that_were_there_without_their_gradients():
    weight = nn.Parameter(torch.ones(2))
    tensors, _ = split({"state_dict": {"w": weight}})
    assert tensors["state_dict.w"].data_ptr() == weight.data_ptr()
    assert not tensors["state_dict.w"].requires_grad


def test_what_was_not_wanted_is_none():
    _, rest = split(content(3))
    assert join(rest, {})["state_dict"] == {"net.weight": None, "net.bias": None}


def test_the_versions_of_a_modules_parts_survive():
    state = nn.BatchNorm1d(2).state_dict()
    tensors, rest = split({"state_dict": state})
    assert join(rest, tensors)["state_dict"]._metadata == state._metadata


def trained() -> tuple[torch.optim.Optimizer, list[str]]:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW([{"params": net[1].parameters()}, {"params": net[0].parameters(), "lr": 0.5}])
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer, ["1.weight", "1.bias", "0.weight", "0.bias"]


def test_names_in_place_of_numbers_and_back():
    optimizer, names = trained()
    state = by_name(optimizer.state_dict(), names)
    assert list(state["state"]) == names
    assert [group["params"] for group in state["param_groups"]] == [names[:2], names[2:]]
    assert same(by_number(state, names), optimizer.state_dict())


def test_a_directorys_optimizers_in_lightnings_form():
    optimizer, names = trained()
    states = [by_name(optimizer.state_dict(), names), by_name(optimizer.state_dict(), names[::-1])]
    found = to_lightning({"optimizer_states": states})
    assert found[NAMES] == [names, names[::-1]]
    assert same(found["optimizer_states"], [optimizer.state_dict()] * 2)


def test_without_optimizers_there_are_no_names():
    assert to_lightning({"state_dict": {}}) == {"state_dict": {}, NAMES: []}


@pytest.mark.parametrize("template", [None, torch.ones(3, 2)], ids=["none", "another shape"])
def test_room_is_whole_on_the_cpu_where_no_template_fits(template):
    room = like(template, torch.Size([2, 3]), torch.float16)
    assert (room.shape, room.dtype, room.device.type) == ((2, 3), torch.float16, "cpu")


def test_room_has_the_stored_dtype_and_no_gradient():
    room = like(nn.Parameter(torch.ones(2, 3)), torch.Size([2, 3]), torch.float64)
    assert (room.dtype, room.requires_grad) == (torch.float64, False)


def test_what_several_ranks_have_is_merged():
    first = {"state": {"a": {"step": 1}}, "groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    second = {"state": {"b": {"step": 1}}, "groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    assert merged([[first], [second]]) == [{**first, "state": {"a": {"step": 1}, "b": {"step": 1}}}]
    assert merged([first]) == first


def test_tensors_that_nothing_uses_any_more_need_no_garbage_collection():
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        tensors, _ = split({"state_dict": {"a": torch.ones(2)}, "mine": [{"b": torch.ones(LARGE)}]})
        kept = [weakref.ref(tensor) for tensor in tensors.values()]
        assert len(kept) == 2
        del tensors
        assert [tensor() for tensor in kept] == [None, None]
    finally:
        if was_enabled:
            gc.enable()
