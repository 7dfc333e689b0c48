"""The whole copy of a module that the first steps are repeated with: what a plain loop would have trained.

A deep copy shares functions with the original. Those that refer to the module, its parts or its parameters (hooks,
closures) refer to those of the copy here, as its program does. `attachments.py` copies what hangs on parameters.
"""

import copy
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from .._compat.torch import tree_leaves
from ..attachments import copied
from ..checkpoint import get_random_state, set_random_state
from ..initialization.materialize import has_meta_tensors, materialize
from ..initialization.stored_weights import read_stored

__all__ = ["Memory", "copy_whole", "fill_copy", "put"]

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""torch: the attributes of a Tensor with the dicts of `register_hook` and `register_post_accumulate_grad_hook`."""
_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_MAX_ITEMS = 1000
"""The largest container that is read item by item; larger ones hold data or a vocabulary, not what a step keeps."""


def copy_whole(module: Any, *shared: Any) -> Any:
    """Returns a copy of a module that refers to the same objects `shared` as the original."""
    memo = {id(part): part for part in shared if part is not None}
    own = copied(module, memo)
    of_copy = {id(part): memo[id(part)] for part in _program(module) if id(part) in memo}
    hooked = [vars(part) for part in own.modules()]
    hooked += [{name: getattr(p, name) for name in _TENSOR_HOOKS} for p in own.parameters()]
    for attributes in hooked:
        for name, value in list(attributes.items()):
            if isinstance(value, types.FunctionType):
                attributes[name] = _rebound(value, of_copy)
            elif name.endswith("_hooks") and isinstance(value, dict):  # torch: nn.Module._forward_hooks and the like
                value.update({key: _rebound(hook, of_copy) for key, hook in value.items()})
    return own


def _program(module: nn.Module) -> Iterator[Any]:
    """Yields the objects that a function of the user's may refer to."""
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (
            value for value in vars(part).values() if isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")
        )


def _rebound(function: Any, of_copy: dict[int, Any]) -> Any:
    """Returns a function that refers to the copy in place of the original; any other callable as it is."""
    if not isinstance(function, types.FunctionType):
        return function
    cells = function.__closure__ or ()
    contents = [cell.cell_contents if _is_filled(cell) else cell for cell in cells]
    defaults = function.__defaults__ or ()
    if not any(id(value) in of_copy for value in (*contents, *defaults)):
        return function
    own = tuple(
        types.CellType(of_copy[id(value)]) if id(value) in of_copy else cell
        for cell, value in zip(cells, contents, strict=True)
    )
    bound = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(of_copy.get(id(value), value) for value in defaults) or None,
        own or None,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def fill_copy(own: LightningModule, module: LightningModule, state: dict[str, Any], shares_buffers: bool) -> None:
    """Gives the copy what the module has now: weights, buffers, modes, and data that hooks have set.

    Args:
        own: the copy.
        module: the module, which is split by now.
        state: the whole state dict of `module`.
        shares_buffers: whether this rank's buffers that are not in `state` are those of the whole module.
    """
    if has_meta_tensors(own):
        random = get_random_state()
        materialize(own)
        read_stored(own)
        set_random_state(random)
    for part, its_copy in _paired_submodules(module, own):
        its_copy.training = part.training
        for name, value in vars(part).items():
            if not name.startswith("_") and is_data(value) and _is_leaf(value):
                _put(vars(its_copy), name, copy.deepcopy(value))
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    own.load_state_dict(state, strict=False)
    if shares_buffers:
        buffers = dict(module.named_buffers())
        for name, buffer in own.named_buffers():
            present = buffers.get(name)
            if name not in state and present is not None and present.shape == buffer.shape and not present.is_meta:
                buffer.copy_(present)


def is_data(value: Any) -> bool:
    """Returns whether `value` is a number, a text, a tensor that is no parameter, or a container of these."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if isinstance(value, _CONTAINERS) and len(value) <= _MAX_ITEMS:
        return all(map(is_data, (*value, *value.values()) if isinstance(value, dict) else value))
    return isinstance(value, _SCALARS)


class Memory:
    """The data that a module and its parts keep in plain attributes on one rank.

    Each rank has its own, as each has its own samples: a step of rank 1 doesn't see what one of rank 0 has left.
    """

    def __init__(self, module: nn.Module) -> None:
        self._data = {
            name: {key: value for key, value in data.items() if _is_leaf(value)}
            for name, data in _data_of(module).items()
        }
        self._data = copy.deepcopy(self._data)

    def recall(self, module: nn.Module) -> None:
        """Puts the data into the attributes of `module`."""
        for name, data in _data_of(module).items():
            own = vars(module.get_submodule(name))
            before = self._data.get(name, {})
            for key in data.keys() - before.keys():
                del own[key]
            for key, value in before.items():
                _put(own, key, copy.copy(value) if isinstance(value, _CONTAINERS) else value)

    def changes(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """Returns copies of the data of `module` that is no longer as here."""
        changed: dict[str, dict[str, Any]] = {}
        for name, data in _data_of(module).items():
            before = self._data.get(name, {})
            new = {k: v for k, v in data.items() if _is_leaf(v) and not (k in before and _are_equal(v, before[k]))}
            if new:
                changed[name] = copy.deepcopy(new)
        return changed

    def keep(self, module: nn.Module) -> None:
        """Takes the data that is in the attributes of `module`."""
        self._data = {
            name: {key: copy.copy(value) if isinstance(value, _CONTAINERS) else value for key, value in data.items()}
            for name, data in _data_of(module).items()
        }


def put(module: nn.Module, changes: dict[str, dict[str, Any]]) -> None:
    """Puts what `Memory.changes` has returned into the attributes of another module."""
    for name, data in changes.items():
        for key, value in data.items():
            _put(vars(module.get_submodule(name)), key, value)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(map(_are_equal, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute; a container gets the content of another one, since functions may refer to it."""
    present: Any = attributes.get(name)
    if type(present) is type(value) and isinstance(value, (list, dict, set, deque)):
        present.clear()
        (present.extend if isinstance(present, (list, deque)) else present.update)(value)
    else:
        attributes[name] = value


def _data_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in vars(part).items() if not key.startswith("_") and is_data(value)}
        for name, part in module.named_modules()
    }


def _is_leaf(value: Any) -> bool:
    """Whether no tensor in `value` has a graph, with which it can't be copied."""
    return all(not isinstance(leaf, Tensor) or leaf.is_leaf for leaf in tree_leaves(value))


def _paired_submodules(module: nn.Module, copy: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields the sub-modules of `module`, each with the one of the same name in `copy`."""
    copies = dict(copy.named_modules())
    for name, part in module.named_modules():
        if name in copies:
            yield part, copies[name]
