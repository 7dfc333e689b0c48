"""Finds the random generators that a data set has as attributes, such as `self.rng`, or in one of its transforms.

A checkpoint has their states beside those of the global generators. The search follows attributes, lists, tuples,
dicts, `functools.partial`s, bound methods and closures. `OwnGenerators` caches it, since it is needed for each batch.
"""

import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from ..checkpoint.rng import host_state, set_random_state

__all__ = ["OwnGenerators", "set_own_states", "set_state_here", "states_of_own"]

_MOST = 300
"""The most objects that are searched, and the most items of one container, which may be a list of all samples."""
_NUMBERS = range(_MOST)
_MANY = 64
"""Containers with more items are taken for lists of samples: they are searched last, and plain values in them once."""
_PLAIN = (str, bytes, int, float, bool, complex, type(None), type, torch.Tensor, np.ndarray)
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerators:
    """The generators of a data set: searched once, and again when an object on the path to one has changed.

    Their states are read for each batch. A search takes a millisecond if a data set has a list of its samples; a check
    whether the searched objects have changed takes microseconds.

    Args:
        data: the data set.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._found: dict[str, Any] | None = None
        self._containers: list[_Container] = []
        self._empty: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Objects have other identities in another process.
        return {"data": self.data, "_found": None, "_containers": [], "_empty": []}

    def find(self) -> dict[str, Any]:
        """Returns the generators, by the path of attributes to them."""
        if self._found is None or any(self._empty) or not all(map(_Container.is_unchanged, self._containers)):
            self._found, containers = _search(self.data)
            self._empty = [container.owner for container in containers if container.is_empty]
            self._containers = [container for container in containers if not container.is_empty]
        return self._found

    def states(self) -> dict[str, Any]:
        """Returns the states of the generators by path, as plain values."""
        return {path: _state_of(generator) for path, generator in self.find().items()}

    def state_here(self) -> dict[str, Any]:
        """Returns all states that the data set may draw from in this process: the global generators, and its own."""
        return {**host_state(), "own": self.states()}


def _search(data: Any) -> "tuple[dict[str, Any], list[_Container]]":
    """Returns the generators by path, and the searched objects that may change."""
    generators: dict[str, Any] = {}
    containers: list[_Container] = []
    seen: set[int] = set()
    waiting, samples = deque([("", data)]), deque[tuple[str, Any]]()
    while (waiting or samples) and len(seen) < _MOST:
        is_sample = not waiting
        path, value = (waiting or samples).popleft()
        if id(value) in seen or isinstance(value, (random.SystemRandom, OwnGenerators)):
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            generators[path.lstrip(".")] = value
            continue
        parts = [(name, member) for name, member in _parts(value) if not isinstance(member, _PLAIN)]
        if (parts or not is_sample) and (read := _reader(value)) is not None:
            containers.append(_Container(value, read))
        are_samples = isinstance(value, (list, tuple, dict)) and len(value) > _MANY
        (samples if are_samples else waiting).extend((f"{path}.{name}", member) for name, member in parts)
    return generators, containers


class _Container:
    """A searched object, with its parts at that time.

    Args:
        owner: the object.
        read: returns the names and the values of its parts.
    """

    def __init__(self, owner: Any, read: "_Reader") -> None:
        self.owner, self._read = owner, read
        self._names, self._values = read(owner)

    @property
    def is_empty(self) -> bool:
        """Whether it is an empty list or dict; a module has about ten of these."""
        return isinstance(self.owner, (list, dict)) and not self._values

    def is_unchanged(self) -> bool:
        """Whether it has the same parts, except plain values such as a counter."""
        names, values = self._read(self.owner)
        if len(values) == len(self._values) and all(map(operator.is_, values, self._values)) and names == self._names:
            return True
        is_same = _followed(names, values) == _followed(self._names, self._values)
        self._names, self._values = names, values
        return is_same


def _followed(names: Iterable[Any], values: list[Any]) -> list[tuple[Any, int]]:
    named = zip(names, values, strict=False)
    return [(name, id(value)) for name, value in named if not isinstance(value, _PLAIN)]


_Reader = Callable[[Any], tuple[Sequence[Any], list[Any]]]


def _reader(value: Any) -> _Reader | None:
    """Returns a function that reads the parts of an object; None if its parts stay the same."""
    if isinstance(value, (tuple, functools.partial)):
        return None
    if isinstance(value, list):
        return _of_list
    if isinstance(value, dict):
        return _of_dict
    if callable(value) and getattr(value, "__self__", None) is not None:
        return None
    if callable(value) and getattr(value, "__closure__", None):
        return _of_closure
    return _of_object if hasattr(value, "__dict__") else None


def _of_list(value: list[Any]) -> tuple[Sequence[Any], list[Any]]:
    return _NUMBERS, value[:_MOST]


def _of_dict(value: dict[Any, Any]) -> tuple[Sequence[Any], list[Any]]:
    return list(islice(value, _MOST)), list(islice(value.values(), _MOST))


def _of_closure(value: Any) -> tuple[Sequence[Any], list[Any]]:
    return _NUMBERS, list(map(_content, value.__closure__))


def _of_object(value: Any) -> tuple[Sequence[Any], list[Any]]:
    attributes = vars(value)
    return list(attributes), list(attributes.values())


def _own_generators(data: Any) -> dict[str, Any]:
    """Returns the generators of a data set, by the path of attributes to them."""
    return _search(data)[0]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((str(i), item) for i, item in enumerate(value[:_MOST]))
    elif isinstance(value, dict):
        yield from ((str(name), value[name]) for name in list(islice(value, _MOST)))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif (owner := getattr(value, "__self__", None)) is not None and callable(value):
        yield "__self__", owner
    elif callable(value) and getattr(value, "__closure__", None):
        yield from zip(value.__code__.co_freevars, map(_content, value.__closure__), strict=True)
    # Hugging Face's data sets copy their generators for each epoch.
    elif "_ex_iterable" not in (attributes := getattr(value, "__dict__", {})):
        yield from list(attributes.items())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def states_of_own(data: Any) -> dict[str, Any]:
    """Returns the states of the generators of a data set by path, as plain values."""
    return OwnGenerators(data).states()


def set_own_states(data: Any, states: dict[str, Any]) -> None:
    """Sets the generators of a data set to the result of `states_of_own`; creates those that it has not created yet."""
    if not states:
        return
    generators = _own_generators(data)
    for path, state in states.items():
        if path in generators:
            _set(generators[path], state)
        elif getattr(data, path, _NOTHING) is None:
            setattr(data, path, _new(state))


_NOTHING = object()


def _state_of(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()} if generator.device.type == "cpu" else {}
    if isinstance(generator, random.Random):
        return {"python": generator.getstate()}
    if isinstance(generator, np.random.RandomState):
        return {"old numpy": _plain(generator.get_state(legacy=False))}
    return {"numpy": _plain(generator.bit_generator.state)}


def _set(generator: Any, state: dict[str, Any]) -> None:
    if isinstance(generator, torch.Generator) and "torch" in state:
        generator.set_state(state["torch"])
    elif isinstance(generator, random.Random) and "python" in state:
        version, keys, gauss = state["python"]
        generator.setstate((version, tuple(keys), gauss))
    elif isinstance(generator, np.random.RandomState) and "old numpy" in state:
        generator.set_state(_arrays(state["old numpy"]))
    elif isinstance(generator, np.random.Generator) and "numpy" in state:
        kind = state["numpy"]["bit_generator"]
        if type(generator.bit_generator).__name__ == kind:
            generator.bit_generator.state = _arrays(state["numpy"])


def _new(state: dict[str, Any]) -> Any:
    generator: Any = None
    if "torch" in state:
        generator = torch.Generator()
    elif "python" in state:
        generator = random.Random()
    elif "old numpy" in state:
        generator = np.random.RandomState()
    elif "numpy" in state:
        generator = np.random.Generator(getattr(np.random, state["numpy"]["bit_generator"])())
    _set(generator, state)
    return generator


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {name: _arrays(item) for name, item in value.items()} if isinstance(value, dict) else value


def set_state_here(data: Any, state: dict[str, Any]) -> None:
    """Sets the global generators and those of a data set to the result of `OwnGenerators.state_here`."""
    set_random_state(state)
    set_own_states(data, state["own"])
