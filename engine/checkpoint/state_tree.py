"""Splits Lightning's checkpoint (one nested dict) into tensors and the rest, and joins them again.

Tensors have readable keys: ``state_dict.<parameter>``, ``optimizer_states.<i>.state.<parameter>.<name>``. Optimizer
state is stored by parameter name, so that it does not depend on which rank holds which parameter.
"""

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "NAMES",
    "by_name",
    "by_number",
    "excess",
    "is_mark",
    "is_optimizers_own",
    "is_plain",
    "join",
    "like",
    "mapped",
    "marks",
    "merged",
    "split",
    "structure_of",
    "tensor_keys",
    "to_lightning",
]

NAMES = "optimizer_parameters"

_MARK = "__tensor__"
# A tensor of a callback's that is as large is staged and written like a weight: the rest is serialised while the next
# step waits.
_MANY_BYTES = 1 << 20
_MOST_DEPTH = 200
"""Deeper values exceed Python's recursion limit in `copy.deepcopy` and the like, so they could not be saved either."""
_ALWAYS = ("state_dict", "optimizer_states", "current_model_state")
_AVERAGE = "average_model_state"
"""Lightning: the key of an average in the state of `StochasticWeightAveraging`."""
_VALUES = frozenset({bool, int, float, str, bytes, type(None)})
"""Plain values. The state of a random generator is a list of hundreds, which is taken as a whole."""
_CONTAINERS = (dict, list, tuple, set, frozenset)


def split(checkpoint: Mapping[str, Any], under: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Separates tensors from the rest: weights and optimizer state, and all tensors that are sharded or large.

    Args:
        checkpoint: nested dict.
        under: prefix of the tensors' keys.

    Returns:
        The tensors by key, and the checkpoint with a mark in place of each of them.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, {key: _split(value, under + key, key in _ALWAYS, tensors) for key, value in checkpoint.items()}


def _split(value: Any, path: str, takes_all: bool, tensors: dict[str, Tensor]) -> Any:
    """Returns a part of the checkpoint with marks, and adds its tensors to `tensors`."""
    # No nested function: one that calls itself is a reference cycle, and keeps the tensors until garbage is collected.
    if isinstance(value, Tensor):
        if not is_plain(value):
            return value
        if takes_all or isinstance(value, DTensor) or value.numel() * value.element_size() >= _MANY_BYTES:
            while path in tensors:
                path += "'"  # {"a.b": ...} beside {"a": {"b": ...}}
            tensors[path] = value.detach()
            return {_MARK: path}
        return value
    if type(value) in (dict, OrderedDict):
        items = {}
        for key, item in value.items():
            is_value = type(item) in _VALUES
            items[key] = item if is_value else _split(item, f"{path}.{key}", takes_all or key == _AVERAGE, tensors)
        return _as(value, items)
    if type(value) in (list, tuple):
        if _VALUES.issuperset(map(type, value)):
            return type(value)(value)
        return type(value)(_split(v, f"{path}.{i}", takes_all, tensors) for i, v in enumerate(value))
    return value


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its bytes; others (sparse, say) stay in the rest, for `torch.save`."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Replaces the marks of `split` by their tensors; a mark whose tensor was not read becomes None."""
    if type(rest) in (dict, OrderedDict):
        if is_mark(rest):
            return tensors.get(rest[_MARK])
        return _as(rest, {key: join(value, tensors) for key, value in rest.items()})
    if type(rest) in (list, tuple):
        return type(rest)(join(value, tensors) for value in rest)
    return rest


def is_mark(value: dict[str, Any]) -> bool:
    """Whether a dictionary stands for a tensor that `split` took out."""
    return value.keys() == {_MARK}


def marks(rest: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and the key of each tensor that `split` took out."""
    waiting: list[tuple[str, Any]] = [("", rest)] if isinstance(rest, (dict, list, tuple)) else []
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            if len(part) == 1 and _MARK in part:  # as in `is_mark`, without a call for each tensor
                yield path, part[_MARK]
                continue
            inner: Iterable[tuple[Any, Any]] = part.items()
        else:
            inner = enumerate(part)
        beginning = f"{path}." if path else ""
        # Numbers and texts are left out at once: the state of a random generator has hundreds.
        waiting += [(f"{beginning}{key}", value) for key, value in inner if isinstance(value, (dict, list, tuple))]


def tensor_keys(rest: Any) -> list[str]:
    """Returns the keys of the tensors that `split` took out."""
    return [key for _, key in marks(rest)]


def merged(trees: list[Any]) -> Any:
    """Merges the nested values of several ranks into one; entries that several ranks have must be equal."""
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return _as(first, {key: merged([tree[key] for tree in trees if key in tree]) for key in keys})
    if type(first) in (list, tuple):
        return type(first)(merged(list(parts)) for parts in zip(*trees, strict=True))
    return first


def structure_of(value: Any) -> int:
    """Returns the CRC-32 of a nested value's structure: its keys, and the types of its parts, in their order."""
    return zlib.crc32(repr(_structure(value)).encode(errors="backslashreplace"))


def _structure(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        parts: list[Any] = [kind.__name__]
        for key, item in value.items():  # one loop, without a call for marks and plain values, since there are many
            name = key if type(key) in _VALUES else type(key).__name__  # the text of others may name a place in memory
            if type(item) in _VALUES:
                parts.append((name, type(item).__name__))
            else:
                parts.append((name, _MARK if type(item) is dict and _MARK in item else _structure(item)))
        return parts
    if kind in (list, tuple):
        if _VALUES.issuperset(map(type, value)):
            return [kind.__name__, [item.__name__ for item in map(type, value)]]
        return [kind.__name__, [_structure(item) for item in value]]
    return "Tensor" if isinstance(value, Tensor) else kind.__name__


def mapped(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Applies `function` to each tensor (or instance of `kind`) of a nested value; returns the new nested value."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (dict, OrderedDict):
        return _as(value, {key: mapped(function, item, kind) for key, item in value.items()})
    if type(value) in (list, tuple):
        if _VALUES.issuperset(map(type, value)):
            return type(value)(value)
        return type(value)(mapped(function, item, kind) for item in value)
    return value


def excess(value: Any, most_values: int, most_bytes: int) -> str | None:
    """Returns what is too much in a nested value of a file, None if nothing is; looks once at each part.

    A list that contains another one twice, which contains a third one twice, and so on, is short in a file and endless
    for whatever walks through it. So is a list that contains itself, or a tensor that repeats its elements.

    Args:
        value: nested value.
        most_values: the most values that a walk through it may meet.
        most_bytes: the most bytes that its tensors may have; elements that a tensor repeats count each time.
    """
    numbers: dict[int, int] = {}
    around: set[int] = set()
    waiting: list[tuple[Any, Any]] = [(value, None)]
    num_bytes, stored_bytes = 0, dict[int, int]()
    while waiting:
        part, inner = waiting.pop()
        key = id(part)
        if isinstance(part, Tensor) and key not in numbers:
            numbers[key] = 1
            if is_plain(part) and not part.is_meta:
                storage = part.untyped_storage()
                stored_bytes[storage._cdata] = storage.nbytes()
                num_bytes += max(0, math.prod(part.shape) * part.element_size() - storage.nbytes())
        if inner is not None:  # all that lies in it is counted
            around.remove(key)
            number = 1 + sum([numbers.get(id(item), 1) for item in inner])
            numbers[key] = min(number, most_values + 1)
        elif key in around:
            return "has a value that contains itself"
        elif len(around) > _MOST_DEPTH:
            return f"is nested more than {_MOST_DEPTH} deep"
        elif key not in numbers and isinstance(part, _CONTAINERS):
            inner = [*part, *part.values()] if isinstance(part, dict) else part
            if _VALUES.issuperset(map(type, inner)):  # such as the thousands of marks of tensors
                numbers[key] = min(1 + len(inner), most_values + 1)
                continue
            around.add(key)
            waiting.append((part, inner))
            waiting += [(item, None) for item in inner if isinstance(item, (*_CONTAINERS, Tensor))]
    if numbers.get(id(value), 1) > most_values:
        return f"repeats values, so that it has more than {most_values:,}"
    num_bytes += sum(stored_bytes.values())
    return "has tensors that are larger than the file" if num_bytes > most_bytes else None


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns an optimizer's state dict with parameter names instead of numbers.

    Args:
        state: a result of `torch.optim.Optimizer.state_dict`.
        names: names of the parameters, in the order of the optimizer's groups.
    """
    return _renamed(state, lambda key: _OPTIMIZERS_OWN + key if isinstance(key, str) else names[key])


def all_by_name(states: Sequence[dict[str, Any]], names: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Applies `by_name` to several optimizers, each with its parameter names."""
    return [by_name(state, of_state) for state, of_state in zip(states, names, strict=True)]


def by_number(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Reverses `by_name`, for an optimizer whose parameters are in the order of `names`."""
    numbers = {name: number for number, name in enumerate(names)}
    return _renamed(state, lambda key: key.removeprefix(_OPTIMIZERS_OWN) if is_optimizers_own(key) else numbers[key])


def to_lightning(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Converts the content of a checkpoint directory to the form of Lightning's hooks, callbacks and files.

    The names of each optimizer's parameters are kept under `NAMES`.
    """
    states = checkpoint.get("optimizer_states", [])
    names = [[name for group in state["param_groups"] for name in group["params"]] for state in states]
    if states:
        checkpoint["optimizer_states"] = [by_number(state, own) for state, own in zip(states, names, strict=True)]
    checkpoint[NAMES] = names
    return checkpoint


def _as(original: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """Converts `changed` to the type of `original`, with the `_metadata` attribute of a module's state dict."""
    if type(original) is not OrderedDict:
        return changed
    ordered = OrderedDict(changed)
    ordered.__dict__.update(original.__dict__)
    return ordered


_OPTIMIZERS_OWN = "."
"""Begins, among names of parameters, a key under which an optimizer keeps state of all of them (a count of its steps):
no name of a parameter begins so."""


def is_optimizers_own(key: str) -> bool:
    """Whether a key of an optimizer's named state is one of its own, and no parameter's name."""
    return key.startswith(_OPTIMIZERS_OWN)


def _renamed(state: dict[str, Any], new: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {new(key): value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [new(key) for key in group["params"]]} for group in state["param_groups"]],
    }


def like(template: Tensor | None, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocates a tensor to read into: sharded like `template` if the shapes agree, else unsharded on the CPU."""
    if template is not None and template.shape == size:
        return torch.empty_like(template, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
