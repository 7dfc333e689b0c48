"""References to parameters that a strategy replaces: a list in the constructor, a key of a dict, a closure.

`fully_shard`, `parallelize_module` and the creation of meta tensors put other objects in the place of a module's
parameters. A program may have kept the earlier ones, for its `configure_optimizers` or for a penalty. `Replacements`
puts the present parameters into lists, dicts, sets, tuples, attributes and closures, and into collections of `id`s that
are attributes of the module. What it can't reach, such as a variable of a running function, becomes an object that
raises an error with the parameter's name when it is used.
"""

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..attachments import carry_over, update_ids

__all__ = ["Replacements"]


class Replacements:
    """The parameters of `module` that were replaced, from the construction on.

    Args:
        module: before any parameter is replaced.
        flag: flag of the strategy, for messages.
    """

    def __init__(self, module: nn.Module, flag: str) -> None:
        self._module, self._flag = module, flag
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._new: dict[int, Tensor] = {}
        """The present replacement of each parameter, by the id of the replaced one."""
        self._replaced_by: dict[int, list[int]] = {}
        """The ids of the replaced parameters, by the id of the present one: what lies between is freed."""
        self._old: list[weakref.ref[Tensor]] = []  # weak, so that a whole parameter is freed once it is split

    def note(self, old: Tensor, new: Tensor) -> None:
        """Notes that `new` is in the place of `old`."""
        replaced = [*self._replaced_by.pop(id(old), ()), id(old)]
        self._new.update(dict.fromkeys(replaced, new))
        self._replaced_by[id(new)] = replaced
        self._names.setdefault(id(new), self._names.get(id(old), ""))
        self._old.append(weakref.ref(old))

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Attaches to `new`, which replaces `old`, what is attached to `old`, and notes it."""
        carry_over(old, new)
        self.note(old, new)

    @contextmanager
    def within(self, submodule: nn.Module) -> Iterator[None]:
        """Context in which parameters of `submodule` are replaced."""
        before = [(part, key, p) for part in submodule.modules() for key, p in part._parameters.items()]
        yield
        for part, key, old in before:
            new = part._parameters[key]
            if old is not None and new is not None and new is not old and self._new.get(id(old)) is not new:
                self.replace(old, new)

    def update_references(self) -> None:
        """Puts the present parameters where the program has kept the earlier ones."""
        update_ids(self._module, {key: id(new) for key, new in self._new.items()})
        kept = [old for reference in self._old if (old := reference()) is not None]
        self._old.clear()
        if kept:
            with _all_objects():
                _put({id(old): self._new[id(old)] for old in kept}, kept)
            for old in kept:
                _make_unusable(old, self._names.get(id(old), "a parameter"), self._flag)


@contextmanager
def _all_objects() -> Iterator[None]:
    """Context in which the garbage collector knows the objects that a fork has from its parent, and collects none."""
    is_frozen, is_enabled = gc.get_freeze_count() > 0, gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()
        if is_enabled:
            gc.enable()


def _put(new: dict[int, Any], old: list[Any]) -> None:
    """Replaces objects in all containers and attributes that refer to them.

    Args:
        new: the replacement of each object, by its id.
        old: the objects.
    """
    for holder in gc.get_referrers(*old):
        if holder is old or isinstance(holder, (types.FrameType, types.GeneratorType)):
            continue
        if isinstance(holder, (tuple, frozenset)):
            if type(holder) in (tuple, frozenset):
                _put({id(holder): type(holder)(new.get(id(item), item) for item in holder)}, [holder])
        elif isinstance(holder, (list, deque)):
            for index, item in enumerate(holder):
                if id(item) in new:
                    holder[index] = new[id(item)]
        elif isinstance(holder, MutableSet):
            for item in [item for item in holder if id(item) in new]:
                holder.discard(item)
                holder.add(new[id(item)])
        elif isinstance(holder, MutableMapping):
            _put_into_mapping(holder, new)
        elif isinstance(holder, types.CellType):
            holder.cell_contents = new[id(holder.cell_contents)]
        elif isinstance(holder, functools.partial):
            args = tuple(new.get(id(holder.args), holder.args))
            holder.__setstate__((holder.func, args, holder.keywords, vars(holder)))  # type: ignore[attr-defined]
        elif isinstance(holder, types.FunctionType):
            holder.__defaults__ = new.get(id(holder.__defaults__), holder.__defaults__)
        else:
            _put_into_attributes(holder, new)


def _put_into_mapping(mapping: MutableMapping[Any, Any], new: dict[int, Any]) -> None:
    for key, value in list(mapping.items()):
        if id(value) in new:
            mapping[key] = new[id(value)]
    if any(id(key) in new for key in mapping):
        items = [(new.get(id(key), key), value) for key, value in mapping.items()]
        mapping.clear()
        mapping.update(items)


def _put_into_attributes(holder: Any, new: dict[int, Any]) -> None:
    """Replaces the attributes of an object; it may have no dict, or keep it apart from the garbage collector."""
    if isinstance(attributes := getattr(holder, "__dict__", None), dict):
        _put_into_mapping(attributes, new)
    slots = [slot for kind in type(holder).__mro__ for slot in vars(kind).get("__slots__", ())]
    for slot in slots:
        if id(value := getattr(holder, slot, None)) in new:
            object.__setattr__(holder, slot, new[id(value)])


def _make_unusable(parameter: Tensor, name: str, flag: str) -> None:
    """Frees the memory of a parameter that was replaced, and makes each use of it an error."""

    def refuse(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{name!r} was kept as it was before {flag} replaced it, where it could not be replaced: take it from the"
            f" module when you use it, as `module.get_parameter({name!r})`."
        )

    if isinstance(parameter, DTensor) or type(parameter).__torch_function__ is not _TORCH_FUNCTION:
        return  # it existed during the set-up only, or has a class with operations of its own
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    members = {"__torch_function__": classmethod(refuse), "__repr__": lambda self: f"<replaced parameter {name!r}>"}
    parameter.__class__ = type("ReplacedParameter", (nn.Parameter,), members)


_TORCH_FUNCTION = nn.Parameter.__torch_function__
