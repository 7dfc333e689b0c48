"""Finds the random generators that a data set has as attributes, such as `self.rng`, or in one of its transforms.

A checkpoint has their states beside those of the global generators. The search follows attributes, lists, tuples,
dicts, `functools.partial`s, bound methods and closures. `OwnGenerators` caches it, since it is needed for each batch.
"""

import functools
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
import torch

from ..attachments import is_filled
from ..checkpoint.rng import is_same_state, set_random_state

__all__ = ["OwnGenerators", "States", "searched_parts", "set_own_states", "set_state_here"]

_MOST = 300
"""The most objects that are searched, and the most items of one container, which may be a list of all samples."""
_NUMBERS = range(_MOST)
_MANY = 64
"""Containers with more items are taken for lists of samples: they are searched last, and plain values in them once."""
_PLAIN = (str, bytes, int, float, bool, complex, type(None), type, torch.Tensor, np.ndarray)
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


_Global = tuple[bytes, tuple[Any, ...], tuple[Any, ...]]


class States:
    """The states of a process's generators, quick to read, compare and send. Not a tuple, which pin_memory traverses.

    Args:
        content: the states of torch, NumPy and Python.
        own: the states of the generators of a data set, as plain values.
    """

    def __init__(self, content: _Global, own: dict[str, Any]) -> None:
        self.content, self.own = content, own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, States) and self.content == other.content and is_same_state(self.own, other.own)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, state: dict[str, Any]) -> "States":
        """Rebuilds the states from a result of `plain`, or of `get_random_state`."""
        version, keys, gauss = state["python"]
        name, numpys, *rest = state["numpy"]
        numpys = np.array(numpys, dtype=np.uint32).tobytes()
        torchs = state["torch"].numpy().tobytes()
        return cls((torchs, (name, numpys, *rest), (version, tuple(keys), gauss)), state.get("own", {}))

    def plain(self) -> dict[str, Any]:
        """Returns the states as plain values, for `set_state_here`."""
        torchs, (name, keys, *rest), pythons = self.content
        return {
            "python": pythons,
            "numpy": [name, np.frombuffer(keys, dtype=np.uint32).tolist(), *rest],
            "torch": torch.frombuffer(bytearray(torchs), dtype=torch.uint8),
            "own": self.own,
        }


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
        are_same = self._found is not None and not any(self._empty)
        # No call for a usual object, since this is called twice for each batch.
        for number, (owner, is_usual, names, values) in enumerate(self._containers if are_same else ()):
            names_now, now = ([*vars(owner)], [*vars(owner).values()]) if is_usual else _parts_now(owner)
            if len(now) != len(values) or names_now != names:
                are_same = are_same and _followed(names_now, now) == _followed(names, values)
            elif not all(map(operator.is_, now, values)):
                for value, before in zip(now, values, strict=True):
                    is_plain = isinstance(value, _PLAIN) and isinstance(before, _PLAIN)  # such as a counter
                    are_same = are_same and (is_plain or value is before)
            self._containers[number] = owner, is_usual, names_now, now
        if not are_same or self._found is None:
            self._found, containers = _search(self.data)
            # A module has about ten empty dictionaries.
            empty = [not values and isinstance(owner, (list, dict)) for owner, _, _, values in containers]
            self._empty = [container[0] for container in compress(containers, empty)]
            self._containers = list(compress(containers, map(operator.not_, empty)))
        return self._found

    def states(self) -> dict[str, Any]:
        """Returns the states of the generators by path, as plain values."""
        return {path: _state_of(generator) for path, generator in self.find().items()}

    def read(self) -> tuple[_Global, dict[str, Any]]:
        """Returns the arguments of `States` of all that the data set may draw from in this process."""
        name, keys, *rest = np.random.get_state(legacy=True)
        torchs = torch.default_generator.get_state().numpy().tobytes()
        numpys = (name, keys.tobytes(), *rest)  # type: ignore[union-attr]
        return (torchs, numpys, random.getstate()), self.states() if self.find() else {}

    def here(self) -> States:
        """Returns all states that the data set may draw from in this process: the global generators, and its own."""
        return States(*self.read())


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
        if (parts or not is_sample) and _may_change(value):
            is_usual = not isinstance(value, (list, dict)) and not _is_closure(value)
            containers.append((value, is_usual, *_parts_now(value)))
        are_samples = isinstance(value, (list, tuple, dict)) and len(value) > _MANY
        (samples if are_samples else waiting).extend((f"{path}.{name}", member) for name, member in parts)
    return generators, containers


def searched_parts(data: Any) -> list[Any]:
    """Returns the objects, lists, dicts and closures that a search for generators comes through, if they may change."""
    return [container[0] for container in _search(data)[1]]


_Container = tuple[Any, bool, Sequence[Any], list[Any]]
"""A searched object that may change, whether its parts are its attributes, and the names and values of its parts."""


def _may_change(value: Any) -> bool:
    """Whether an object may have other parts later."""
    if isinstance(value, (list, dict)) or _is_closure(value):
        return True
    is_bound = callable(value) and getattr(value, "__self__", None) is not None
    return not isinstance(value, (tuple, functools.partial)) and not is_bound and hasattr(value, "__dict__")


def _is_closure(value: Any) -> bool:
    return callable(value) and getattr(value, "__self__", None) is None and bool(getattr(value, "__closure__", None))


def _parts_now(owner: Any) -> tuple[Sequence[Any], list[Any]]:
    """Returns the names and the values of the parts of an object that may change."""
    if isinstance(owner, list):
        return _NUMBERS, owner[:_MOST]
    if isinstance(owner, dict):
        return list(islice(owner, _MOST)), list(islice(owner.values(), _MOST))
    if _is_closure(owner):
        return _NUMBERS, _cells(owner)
    return [*vars(owner)], [*vars(owner).values()]


def _followed(names: Iterable[Any], values: list[Any]) -> list[tuple[Any, int]]:
    named = zip(names, values, strict=False)
    return [(name, id(value)) for name, value in named if not isinstance(value, _PLAIN)]


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
        yield from zip(value.__code__.co_freevars, _cells(value), strict=True)
    # Hugging Face's data sets copy their generators for each epoch.
    elif "_ex_iterable" not in (attributes := getattr(value, "__dict__", {})):
        yield from list(attributes.items())


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents if is_filled(cell) else None for cell in function.__closure__]


def set_own_states(data: Any, states: dict[str, Any]) -> None:
    """Sets the generators of a data set to a result of `OwnGenerators.states`; creates those that it lacks so far."""
    if not states:
        return
    generators, _ = _search(data)
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
    """Sets the global generators and those of a data set to the result of `States.plain`."""
    set_random_state(state)
    set_own_states(data, state["own"])
