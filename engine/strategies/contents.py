"""The contents of the objects that a call can reach, recorded before a call that will be repeated.

A forward may write into lists, dicts and objects among its arguments (the cache of a decoder, a list of auxiliary
losses), into attributes of modules, and into globals that its code names. When the recorded contents are put back,
each object keeps its identity. So every reference to it sees them: an argument, an attribute, a closure, a method.
"""

import collections
import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "OF_MODULES",
    "PLAIN",
    "Contents",
    "begin_count",
    "containers_of_classes",
    "end_count",
    "in_tuples",
    "is_counted",
    "num_writes",
    "places_in",
    "put_values",
    "referenced",
]

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
_MUTABLE = (collections.OrderedDict, dict, list, collections.deque, set)
"""Containers whose content can change, each before its bases."""
_LIBRARIES = ("torch", "lightning", "builtins", "logging", __name__.split(".")[0])
# Attributes of every module; a forward does not change parameters, and FSDP swaps them in and out of its modules.
OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
_MAX_DEPTH = 12
"""Levels of nested objects. The tensors of a decoder's cache are nine levels below the arguments."""

_Place = tuple[dict[str, Any], str]
"""The globals of a function, and a name in them."""


def _is_of_a_users_class(value: Any) -> bool:
    """Whether a value is an object with attributes whose class is none of Python's, torch's, Lightning's or ours."""
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    package = type(value).__module__.split(".")[0]
    return package not in _LIBRARIES and (_has_attributes(value) or hasattr(value, "__slots__"))


def _has_attributes(value: Any) -> bool:
    """Whether an object has attributes of its own; `list[int]` shows those of its class, which can't be set."""
    return isinstance(getattr(value, "__dict__", None), dict)


def referenced(hook: Any) -> list[Any]:
    """Returns the containers, modules and users' objects that a function refers to: globals, closure, `self`."""
    if isinstance(hook, functools.partial):
        return [*referenced(hook.func), *hook.args, *hook.keywords.values()]
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType):
        return [getattr(hook, "__self__", hook)]  # the list of its method `append`
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    values += [cell.cell_contents for cell in function.__closure__ or ()] + [getattr(hook, "__self__", None)]
    values = [value.get(None) if isinstance(value, contextvars.ContextVar) else value for value in values]
    return [v for v in values if type(v) in _CONTAINERS or isinstance(v, nn.Module) or _is_of_a_users_class(v)]


def in_tuples(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `function(value)`; of a tuple, a tuple of what it returns for the items, to any depth."""
    if not isinstance(value, tuple):
        return function(value)
    items = [in_tuples(function, item) for item in value]
    if all(item is before for item, before in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def places_in(module: nn.Module) -> Iterator[_Place]:
    """Returns the globals of the user's code that the forward of a module names: containers, numbers and tensors."""
    for part in module.modules():
        forward = getattr(type(part).forward, "__wrapped__", type(part).forward)
        if isinstance(forward, types.FunctionType) and part.__module__.split(".")[0] not in _LIBRARIES:
            names = forward.__globals__
            for name in forward.__code__.co_names:
                if name in names and isinstance(names[name], (*PLAIN, Tensor, *_MUTABLE)):
                    yield names, name


def containers_of_classes(module: nn.Module) -> list[Any]:
    """Returns the containers that are attributes of the user's classes of a module and its sub-modules."""
    classes = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    users = [kind for kind in classes if kind.__module__.split(".")[0] not in _LIBRARIES]
    attributes = [attribute for kind in users for attribute in vars(kind).items() if not attribute[0].startswith("__")]
    return [value for _, value in attributes if isinstance(value, _MUTABLE)]


class _Content(NamedTuple):
    """The content of an object, one level deep."""

    attributes: dict[str, Any]
    others: dict[str, Any]
    """The buffers of a module, or the slots of an object."""
    items: Any
    """The items of a container, or the state of a generator."""


class Contents:
    """The contents of all that modules, `roots` and globals hold, to `_MAX_DEPTH` levels.

    Tensors are recorded by reference.

    Args:
        modules: recorded with their attributes and buffers, without their parameters.
        roots: objects such as the arguments of a call.
        places: globals.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Iterable[Any] = (), places: Iterable[_Place] = ()) -> None:
        self._recorded: dict[int, tuple[Any, _Content]] = {}
        self._places = [(names, name, names[name]) for names, name in places if name in names]
        self._tensors: list[tuple[Tensor, Any]] = []
        for module in modules:
            self._record(module, 0)
        for root in roots:
            self._visit(root, 0)
        for _, _, value in self._places:
            self._visit(value, 0)

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            for item in value:
                if isinstance(item, Tensor):
                    self._tensors.append((item, None))
                else:
                    self._visit(item, depth + 1)
        elif (
            not isinstance(value, (*PLAIN, Tensor))
            and depth < _MAX_DEPTH
            and id(value) not in self._recorded
            and (isinstance(value, (*_MUTABLE, nn.Module, torch.Generator)) or _is_of_a_users_class(value))
        ):
            self._record(value, depth)

    def _record(self, holder: Any, depth: int) -> None:
        content = _content(holder)
        self._recorded[id(holder)] = holder, content
        if isinstance(holder, torch.Generator):
            return
        items = content.items.values() if isinstance(holder, dict) else content.items
        for item in (*content.attributes.values(), *content.others.values(), *items):
            if not isinstance(item, Tensor):
                self._visit(item, depth + 1)
            elif not isinstance(item, nn.Parameter) and not (isinstance(holder, nn.Module) and item.requires_grad):
                self._tensors.append((item, holder))

    def take_tensors(self) -> list[tuple[Tensor, Any]]:
        """Returns each tensor with what holds it, None for a tuple; called once, since no reference to them is kept.

        Left out are parameters, and the tensors with a gradient that a module holds.
        """
        tensors, self._tensors = self._tensors, []
        return tensors

    def present(self) -> "Contents":
        """Returns the present contents of the same objects."""
        present = Contents(())
        present._recorded = {key: (holder, _content(holder)) for key, (holder, _) in self._recorded.items()}
        present._places = [(names, name, names.get(name)) for names, name, _ in self._places]
        return present

    def put(self, replaced: dict[int, Tensor] | None = None) -> None:
        """Puts the recorded contents back, with other tensors in the place of those whose id is in `replaced`."""
        for holder, content in self._recorded.values():
            _put(holder, _with(content, replaced) if replaced else content)
        for names, name, value in self._places:
            names[name] = replaced.get(id(value), value) if replaced else value


def _content(holder: Any) -> _Content:
    if isinstance(holder, torch.Generator):
        return _Content({}, {}, holder.get_state())
    if isinstance(holder, nn.Module):
        attributes = {name: value for name, value in vars(holder).items() if name not in OF_MODULES}
        return _Content(attributes, dict(holder._buffers), ())
    attributes = dict(vars(holder)) if _has_attributes(holder) else {}
    slots = {name: getattr(holder, name) for name in _slots(type(holder)) if hasattr(holder, name)}
    is_container = isinstance(holder, _MUTABLE)
    items = dict(dict.items(holder)) if isinstance(holder, dict) else list(holder) if is_container else ()
    return _Content(attributes, slots, items)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name


def _with(content: _Content, replaced: dict[int, Tensor]) -> _Content:
    def mapped(items: Any) -> Any:
        if isinstance(items, dict):
            return {key: replaced.get(id(item), item) for key, item in items.items()}
        return items if isinstance(items, Tensor) else [replaced.get(id(item), item) for item in items]

    return _Content(*(mapped(items) for items in content))


def _put(holder: Any, content: _Content) -> None:
    if isinstance(holder, torch.Generator):
        holder.set_state(content.items)
        return
    if isinstance(holder, nn.Module):
        for name in [name for name in vars(holder) if name not in content.attributes and name not in OF_MODULES]:
            del vars(holder)[name]
        vars(holder).update(content.attributes)
        holder._buffers.clear()
        holder._buffers.update(content.others)
        return
    if _has_attributes(holder):
        vars(holder).clear()
        vars(holder).update(content.attributes)
    for name, value in content.others.items():
        object.__setattr__(holder, name, value)
    # By the methods of the base: those of a user's subclass may do more.
    kind: Any = next((kind for kind in _MUTABLE if isinstance(holder, kind)), None)
    if kind is not None:
        kind.clear(holder)
    if isinstance(holder, dict):
        for key, item in content.items.items():
            kind.__setitem__(holder, key, item)
    elif kind is not None:
        (kind.update if kind is set else kind.extend)(holder, content.items)


_data: Any = Tensor.data


class _Counted(Tensor):
    # Names that are no attributes of torch's tensors.
    data_views: list[Tensor]
    num_counts: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as any tensor

    @property
    def data(self) -> Tensor:
        """The values, with a number of writes of their own: autograd does not see them."""
        values: Tensor = _data.__get__(self)
        self.data_views.append(values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"a forward replaces the data of a parameter of shape {tuple(self.shape)}, {self.dtype}, by another of"
                f" shape {tuple(value.shape)}, {value.dtype}, which is refused: choose strategy 'ddp', without"
                " activation_checkpointing."
            )
        values = self.data
        with nullcontext() if value.is_meta else torch._C.DisableTorchFunction():  # a mode sees one assignment
            values.copy_(value)


class _CountedParameter(_Counted, nn.Parameter):
    pass


def begin_count(tensor: Tensor) -> int:
    """Returns the number of writes so far; those through `data` count until `end_count`. Counts may be nested."""
    if type(tensor) in (Tensor, nn.Parameter):
        tensor.__class__ = _Counted if type(tensor) is Tensor else _CountedParameter
        tensor.data_views, tensor.num_counts = [], 0  # type: ignore[attr-defined]
    if isinstance(tensor, _Counted):
        tensor.num_counts += 1
    return num_writes(tensor)


def is_counted(tensor: Tensor) -> bool:
    """Whether writes through `data` are counted, too: not those into a subclass such as a DTensor."""
    return isinstance(tensor, _Counted)


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Writes `values` into a tensor, which autograd does not see."""
    _data.__get__(tensor).copy_(values)


def num_writes(tensor: Tensor) -> int:
    """Returns the number of writes into a tensor; 0 for a tensor of inference mode, which torch does not count."""
    views = tensor.data_views if isinstance(tensor, _Counted) else []
    return 0 if tensor.is_inference() else tensor._version + sum(view._version for view in views)


def end_count(tensor: Tensor) -> int:
    """Returns the number of writes; after the outermost count, the tensor is of torch's class again."""
    num = num_writes(tensor)
    if isinstance(tensor, _Counted):
        tensor.num_counts -= 1
        if not tensor.num_counts:
            del tensor.data_views, tensor.num_counts
            kind: Any = nn.Parameter if isinstance(tensor, _CountedParameter) else Tensor
            tensor.__class__ = kind
    return num
