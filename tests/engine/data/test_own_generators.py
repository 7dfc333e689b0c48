"""Generators that a data set keeps are found again where an object on the way to them has changed, and only there."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polyphase.engine.data.own_generators import OwnGenerators


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _closure() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    rng: Any = None

    def transform() -> Any:
        return rng

    def change(other: Any) -> None:
        nonlocal rng
        rng = other

    return transform, change


def _data() -> Any:
    transform, change = _closure()
    return Holder(
        at=0,
        rng=random.Random(1),
        samples=[(i, str(i)) for i in range(1000)],
        inner=Holder(rng=None, module=torch.nn.Sequential(torch.nn.Dropout())),
        transforms=[Holder(rng=np.random.default_rng(1)), functools.partial(transform)],
        cache={},
        change=change,
        closure=transform,
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda data: setattr(data, "rng", random.Random(2)),
    "a new attribute": lambda data: setattr(data, "other", torch.Generator()),
    "one that goes": lambda data: delattr(data, "rng"),
    "of an object within": lambda data: setattr(data.inner, "rng", random.Random(2)),
    "of a module within": lambda data: setattr(data.inner.module[0], "rng", random.Random(2)),
    "an item of a list": lambda data: data.transforms.__setitem__(0, Holder(rng=random.Random(2))),
    "another item": lambda data: data.transforms.append(random.Random(2)),
    "in an empty dict": lambda data: data.cache.update(rng=random.Random(2)),
    "in a closure": lambda data: data.change(random.Random(2)),
    "in the list of samples": lambda data: data.samples.insert(0, (0, random.Random(2))),
    "in a sample's place": lambda data: data.samples.__setitem__(7, (7, random.Random(2))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_found(change):
    data = _data()
    own = OwnGenerators(data)
    before = own.states()
    assert before == OwnGenerators(data).states()
    change(data)
    assert str(own.states()) == str(OwnGenerators(data).states()) != str(before)


def test_a_counter_does_not_have_all_followed_again():
    data = _data()
    own = OwnGenerators(data)
    found = own.find()
    data.at += 1
    data.name = "a plain value"
    data.rng.random()
    assert own.find() is found
    assert own.states() == OwnGenerators(data).states()


def test_a_copy_looks_for_its_own():
    own = OwnGenerators(Holder(rng=random.Random(1)))
    own.find()
    copied = copy.deepcopy(own)
    assert copied.find()["rng"] is copied.data.rng
