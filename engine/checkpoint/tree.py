"""A checkpoint as Lightning has it, one nested dict, is taken apart into tensors and the rest, and joined again.

Tensors go by readable keys: ``state_dict.<parameter>``, ``optimizer_states.<i>.state.<parameter>.<name>``. The
optimizer's state is kept by parameter names, so that it does not depend on who holds which parameter.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "NAMES",
    "by_name",
    "by_number",
    "is_plain",
    "join",
    "like",
    "mapped",
    "marks",
    "merged",
    "numbered",
    "split",
]

NAMES = "optimizer_parameters"

_MARK = "__tensor__"
_MANY_BYTES = 1 << 20
_ALWAYS = ("state_dict", "optimizer_states")


def split(checkpoint: Mapping[str, Any], under: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Takes the tensors out that are weights, optimizer state, sharded or large.

    Args:
        checkpoint: nested dict.
        under: what their keys begin with.

    Returns:
        The tensors by key; and the checkpoint with marks in their places.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str, takes_all: bool) -> Any:
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
            return _as(value, {key: visit(each, f"{path}.{key}", takes_all) for key, each in value.items()})
        if type(value) in (list, tuple):
            return type(value)(visit(v, f"{path}.{i}", takes_all) for i, v in enumerate(value))
        return value

    return tensors, {key: visit(value, under + key, key in _ALWAYS) for key, value in checkpoint.items()}


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all there is to it; one that is sparse, say, is saved by `torch.save` with the rest."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Puts the tensors back in their places, and None where one was not wanted."""
    if type(rest) in (dict, OrderedDict):
        if rest.keys() == {_MARK}:
            return tensors.get(rest[_MARK])
        return _as(rest, {key: join(value, tensors) for key, value in rest.items()})
    if type(rest) in (list, tuple):
        return type(rest)(join(value, tensors) for value in rest)
    return rest


def marks(rest: Any) -> list[str]:
    """The keys of the tensors that were taken out."""
    if isinstance(rest, dict):
        return [rest[_MARK]] if rest.keys() == {_MARK} else [key for value in rest.values() for key in marks(value)]
    return [key for value in rest for key in marks(value)] if type(rest) in (list, tuple) else []


def merged(everyones: list[Any]) -> Any:
    """Merges the nested values of several ranks into one; ranks agree on what more than one of them has."""
    first = everyones[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in everyones for key in each)
        return _as(first, {key: merged([each[key] for each in everyones if key in each]) for key in keys})
    if type(first) in (list, tuple):
        return type(first)(merged(list(parts)) for parts in zip(*everyones, strict=True))
    return first


def mapped(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """A nested value with `function` of each tensor, or of each `kind`, in its place."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (dict, OrderedDict):
        return _as(value, {key: mapped(function, each, kind) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(mapped(function, each, kind) for each in value)
    return value


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with parameters by name in place of numbers.

    Args:
        state: as `torch.optim.Optimizer.state_dict` has it.
        names: of the parameters, in the order of the optimizer's groups.
    """
    return _renamed(state, lambda number: names[number])


def all_by_name(states: Sequence[dict[str, Any]], names: Sequence[list[str]]) -> list[dict[str, Any]]:
    """`by_name` of several optimizers, each with the names of its parameters."""
    return [by_name(state, of_state) for state, of_state in zip(states, names, strict=True)]


def by_number(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The opposite of `by_name`, for an optimizer whose parameters come in the order of `names`."""
    numbers = {name: number for number, name in enumerate(names)}
    return _renamed(state, numbers.__getitem__)


def numbered(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it comes from a directory, in the form that Lightning's hooks, callbacks and files have.

    The names of each optimizer's parameters stay in it, under `NAMES`.
    """
    states = checkpoint.get("optimizer_states", [])
    names = [[name for group in state["param_groups"] for name in group["params"]] for state in states]
    if states:
        checkpoint["optimizer_states"] = [by_number(state, each) for state, each in zip(states, names, strict=True)]
    checkpoint[NAMES] = names
    return checkpoint


def _as(original: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """`changed` in the type of `original`; a module's OrderedDict has the versions of its parts as an attribute."""
    if type(original) is not OrderedDict:
        return changed
    ordered = OrderedDict(changed)
    ordered.__dict__.update(original.__dict__)
    return ordered


def _renamed(state: dict[str, Any], new: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {new(key): value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [new(key) for key in group["params"]]} for group in state["param_groups"]],
    }


def like(template: Tensor | None, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Room for a stored tensor: sharded as `template` is, if their shapes agree, else whole on the CPU."""
    if template is not None and template.shape == size:
        return torch.empty_like(template, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
