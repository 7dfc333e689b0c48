"""Attributes, classes and hooks that a program attaches to its parameters.

torch drops all of it where it creates another object for the same parameter: `copy.deepcopy`, `fully_shard`,
`parallelize_module`, a tensor with memory in the place of one on the meta device. These functions carry it over:
`carry_over` to an object that replaces a parameter, `copied` to the parameters of a copy.
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping, MutableSet
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import swap_tensors

__all__ = [
    "attach_attributes",
    "carry_over",
    "copied",
    "has_attributes",
    "has_hooks",
    "is_filled",
    "swap",
    "update_ids",
]

_COLLECTIONS = (list, tuple, set, frozenset, dict)
_Module = TypeVar("_Module", bound=nn.Module)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""torch: the attributes of a Tensor with the dicts of `register_hook` and `register_post_accumulate_grad_hook`."""
_OF_TORCH = ("_is_param",)
"""torch: an attribute of parameters of another class than `nn.Parameter`, such as a DTensor."""


def carry_over(old: Tensor, new: Tensor) -> None:
    """Attaches to `new`, which replaces `old`, what is attached to `old`: attributes, class and hooks.

    They are the same objects: handles of hooks stay valid, and an attribute that is set on one of the two is an
    attribute of both.
    """
    attach_attributes(old, new)
    # torch: the dicts of `register_hook` and `register_post_accumulate_grad_hook`
    if old._backward_hooks is not None:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def attach_attributes(old: Tensor, new: Tensor) -> None:
    """Attaches to `new`, a replacement or a temporary copy of `old`, attributes and class of `old`."""
    if vars(new).keys() - {*_OF_TORCH}:  # a tensor that keeps its content there
        vars(new).update(vars(old))
    else:
        own = dict(vars(new))
        new.__dict__ = old.__dict__
        vars(new).update(own)
    if (kind := _kind(old)) is not nn.Parameter and not issubclass(type(new), kind):
        new.__class__ = kind if type(new) is nn.Parameter else _both(type(new), kind)  # type: ignore[arg-type]


def swap(tensor: Tensor, replacement: Tensor) -> None:
    """Gives `tensor`, which stays the same object, the content of `replacement`."""
    carry_over(tensor, replacement)
    swap_tensors(tensor, replacement)


def copied(module: _Module, memo: dict[int, Any] | None = None) -> _Module:
    """Returns a deep copy of `module`, whose parameters keep their attributes and hooks, as `copy.deepcopy` does not.

    A hook that is a method of a part of the module becomes the method of the part's copy. A function stays the same:
    what it refers to is the original's. Removing a hook of the module does not remove it from the copy.

    Args:
        module: any module; it may hold tensors on the meta device.
        memo: as in `copy.deepcopy`: the objects that are not copied, or are copied already, by their ids.
    """
    memo = {} if memo is None else memo
    own = copy.deepcopy(module, memo)
    update_ids(own, {id(parameter): id(memo[id(parameter)]) for parameter in module.parameters()})
    for parameter in module.parameters():
        its_copy = memo[id(parameter)]
        vars(its_copy).update(copy.deepcopy(vars(parameter), memo))
        for name in _HOOKS:
            hooks = getattr(parameter, name)
            if hooks:
                setattr(its_copy, name, OrderedDict((key, _copied_hook(hook, memo)) for key, hook in hooks.items()))
    return own


def update_ids(module: nn.Module, ids: dict[int, int]) -> None:
    """Updates collections of ids of parameters, as in ``self.slow = {id(p) for p in self.head.parameters()}``.

    Args:
        module: with the collections as attributes of its parts.
        ids: the id of each parameter's replacement, by the id of the parameter.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, _COLLECTIONS) and not name.startswith("_"):
                vars(part)[name] = _with_ids(value, ids)


def has_attributes(parameter: Tensor) -> bool:
    """Whether a parameter has attributes of a program, or a class of its own."""
    return bool(vars(parameter).keys() - {*_OF_TORCH}) or _kind(parameter) is not nn.Parameter


def has_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether any parameter has a hook on its gradient."""
    return any(bool(getattr(parameter, name)) for parameter in parameters for name in _HOOKS)


def is_filled(cell: Any) -> bool:
    """Whether a cell of a closure has a value by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _copied_hook(hook: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of a hook; the hook itself if it can't be copied, such as one that refers to a generator."""
    try:
        return copy.deepcopy(hook, memo)
    except Exception:
        return hook


def _kind(parameter: Tensor) -> type[Any]:
    """Returns the class of a parameter as its program knows it."""
    kind = getattr(type(parameter), "of_parameter", type(parameter))
    return kind if issubclass(kind, nn.Parameter) else nn.Parameter


@functools.cache
def _both(wrapper: type[Any], kind: type[Any]) -> type[Any]:
    """Returns the class of the tensors of the class `wrapper`, such as DTensor, that replace parameters of `kind`."""
    return type(kind.__name__, (wrapper, kind), {"of_parameter": kind})


def _with_ids(value: Any, ids: dict[int, int]) -> Any:
    """Returns a collection with the new ids in the place of the old ones; the same object if it is mutable."""
    if not any(type(item) is int and item in ids for item in value):
        return value
    if isinstance(value, MutableMapping):
        items = [(ids.get(key, key) if type(key) is int else key, item) for key, item in value.items()]
        value.clear()
        value.update(items)
        return value
    new = [ids.get(item, item) if type(item) is int else item for item in value]
    if isinstance(value, list):
        value[:] = new
    elif isinstance(value, MutableSet):
        value.clear()
        value.update(new)  # type: ignore[attr-defined]
    else:
        return type(value)(new)
    return value
