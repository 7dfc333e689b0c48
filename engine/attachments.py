"""Attributes, classes and hooks that a program attaches to its parameters.

torch drops all of it where it creates another object for the same parameter: `copy.deepcopy`, `fully_shard`,
`parallelize_module`, a tensor with memory in the place of one on the meta device. These functions carry it over:
`carry_over` to an object that replaces a parameter, `copied` to the parameters of a copy.
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import swap_tensors

__all__ = ["carry_over", "copied", "has_hooks", "swap"]

_Module = TypeVar("_Module", bound=nn.Module)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""torch: the attributes of a Tensor with the dicts of `register_hook` and `register_post_accumulate_grad_hook`."""
_OF_TORCH = ("_is_param",)
"""torch: an attribute of parameters of another class than `nn.Parameter`, such as a DTensor."""


def carry_over(old: Tensor, new: Tensor) -> None:
    """Attaches to `new`, which replaces `old`, what is attached to `old`: the same objects, so that handles of hooks
    stay valid, and an attribute that is set on one of the two is an attribute of both."""
    own = {name: vars(new)[name] for name in _OF_TORCH if name in vars(new)}
    new.__dict__ = old.__dict__
    vars(new).update(own)
    if (kind := _kind(old)) is not nn.Parameter:
        new.__class__ = kind if type(new) is nn.Parameter else _both(type(new), kind)  # type: ignore[arg-type]
    for name in _HOOKS:
        if getattr(old, name) is not None:
            setattr(new, name, getattr(old, name))


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
    for parameter in module.parameters():
        its_copy = memo[id(parameter)]
        vars(its_copy).update(copy.deepcopy(vars(parameter), memo))
        for name in _HOOKS:
            hooks = getattr(parameter, name)
            if hooks:
                setattr(its_copy, name, OrderedDict((key, _copied_hook(hook, memo)) for key, hook in hooks.items()))
    return own


def has_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether any parameter has a hook on its gradient."""
    return any(bool(getattr(parameter, name)) for parameter in parameters for name in _HOOKS)


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
