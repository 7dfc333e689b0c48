"""The contents of the objects that a call can reach, recorded before a call that will be repeated.

A forward may write into lists, dicts and objects among its arguments (the cache of a decoder, a list of auxiliary
losses), into attributes of modules, and into what its code names: globals, attributes of classes, variables of
functions. When the recorded contents are put back, each object keeps its identity. So every reference to it sees them.
"""

import collections
import contextvars
import functools
import itertools
import operator
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "KEPT_IN_PLACE",
    "OF_MODULES",
    "PLAIN",
    "Contents",
    "attributes_of",
    "begin_count",
    "end_count",
    "in_tuples",
    "is_counted",
    "keep_in_place",
    "num_writes",
    "place_in_values",
    "put_attributes",
    "put_values",
]

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MUTABLE = (collections.OrderedDict, dict, list, collections.deque, set)
"""Containers whose content can change, each before its bases."""
KEPT_IN_PLACE = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.ndarray)
"""Generators of random numbers, and arrays: what changes within them."""
_MAX_KEPT_BYTES = 2**20
"""Larger arrays are data."""
_LIBRARIES = ("torch", "lightning", "builtins", "logging", __name__.split(".")[0])
# Attributes of every module; a forward does not change parameters, and FSDP swaps them in and out of its modules.
OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
_MAX_DEPTH = 12
"""Levels of nested objects. The tensors of a decoder's cache are nine levels below the arguments."""

_MAX_ITEMS = 10_000
"""Longer containers are data: they are recorded, and what lies in them is not."""
_MISSING: Any = object()
"""In the place of a value that is not there."""

_Place = tuple[Any, str]
"""A table of values, such as the globals of a function, and a name in it."""


def _is_of_a_users_class(value: Any) -> bool:
    """Whether a value is an object with attributes whose class is none of Python's, torch's, Lightning's or ours."""
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    package = type(value).__module__.split(".")[0]
    return package not in _LIBRARIES and (_has_attributes(value) or hasattr(value, "__slots__"))


def _has_attributes(value: Any) -> bool:
    """Whether an object has attributes of its own; `list[int]` shows those of its class, which can't be set."""
    return isinstance(getattr(value, "__dict__", None), dict)


def in_tuples(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `function(value)`; of a tuple, a tuple of what it returns for the items, to any depth."""
    if not isinstance(value, tuple):
        return function(value)
    items = [in_tuples(function, item) for item in value]
    if all(item is before for item, before in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def keep_in_place(value: Any) -> Callable[[], None] | None:
    """Returns a function that gives a value of `KEPT_IN_PLACE` its present state; None for an array that is large."""
    if isinstance(value, torch.Generator):
        return functools.partial(_set_generator, value, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if value.nbytes > _MAX_KEPT_BYTES or not value.flags.writeable:
        return None
    return functools.partial(np.copyto, value, value.copy())


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def place_in_values(value: Any) -> Any:
    """Returns how far an iterator has come, which nothing puts back; None for anything else."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "ended" if frame is None else [frame.f_lasti, dict(frame.f_locals)]
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, itertools.cycle) and sys.version_info < (3, 14):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated from Python 3.12 on
            return operator.length_hint(value.__reduce__()[1][0], -1)
    if isinstance(value, Iterator) and type(value).__module__ == "builtins":
        return operator.length_hint(value, -1)  # an iterator over a list knows how many values are left
    return None


class _Content(NamedTuple):
    """The content of an object, one level deep."""

    attributes: dict[str, Any]
    others: dict[str, Any]
    """The buffers of a module, or the slots of an object."""
    items: Any
    """The items of a container, or a function that gives one of `KEPT_IN_PLACE` its state; None for data."""


class Contents:
    """The contents of all that modules, `roots` and `places` hold, to `_MAX_DEPTH` levels.

    Tensors are recorded by reference.

    Args:
        modules: recorded with their attributes and buffers, without their parameters.
        roots: objects such as the arguments of a call.
        places: what code names.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Iterable[Any] = (), places: Iterable[_Place] = ()) -> None:
        self._recorded: dict[int, tuple[Any, _Content]] = {}
        self._places = [(names, name, names.get(name, _MISSING)) for names, name in places]
        self._iterators: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Any]] = []
        for module in modules:
            self._record(module, 0)
        for root in roots:
            self._visit(root, 0)
        for names, _, value in self._places[:]:
            if isinstance(value, Tensor):
                self._hold(value, names)
            else:
                self._visit(value, 0)

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            for item in value:
                if isinstance(item, Tensor):
                    self._tensors.append((item, None))
                else:
                    self._visit(item, depth + 1)
        elif isinstance(value, (*PLAIN, Tensor)) or depth >= _MAX_DEPTH or id(value) in self._recorded:
            return
        elif isinstance(value, (*_MUTABLE, nn.Module, *KEPT_IN_PLACE)) or _is_of_a_users_class(value):
            self._record(value, depth)
        elif isinstance(value, contextvars.ContextVar):
            self._places.append((value, "", value.get(_MISSING)))
            self._visit(self._places[-1][2], depth + 1)
        elif isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
            self._visit(value.__self__, depth + 1)
        elif (place := _comparable_place(value)) is not None:
            self._iterators.append((value, place))

    def _record(self, holder: Any, depth: int) -> None:
        content = _content(holder)
        self._recorded[id(holder)] = holder, content
        if isinstance(holder, KEPT_IN_PLACE):
            return
        items = content.items.values() if isinstance(holder, dict) else content.items
        for item in (
            *content.attributes.values(),
            *content.others.values(),
            *(items if len(items) <= _MAX_ITEMS else ()),
        ):
            if isinstance(item, Tensor):
                self._hold(item, holder)
            else:
                self._visit(item, depth + 1)

    def _hold(self, tensor: Tensor, holder: Any) -> None:
        is_graphs = tensor.requires_grad and isinstance(holder, nn.Module)
        if not isinstance(tensor, nn.Parameter) and not is_graphs:
            self._tensors.append((tensor, holder))

    @property
    def advanced(self) -> str:
        """The class of an iterator that has come further since, which can't be put back; "" if none has."""
        return next((type(it).__name__ for it, place in self._iterators if _comparable_place(it) != place), "")

    def add_missing(self, places: Iterable[_Place]) -> None:
        """Adds places without a value, which has come later."""
        self._places += [(names, name, _MISSING) for names, name in places]

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
        present._places = [(names, name, _present_value(names, name)) for names, name, _ in self._places]
        return present

    def put(self, replaced: dict[int, Tensor] | None = None) -> None:
        """Puts the recorded contents back, with other tensors in the place of those whose id is in `replaced`."""
        for holder, content in self._recorded.values():
            _put(holder, _with(content, replaced) if replaced else content)
        for names, name, value in self._places:
            _put_value(names, name, replaced.get(id(value), value) if replaced else value)


def _present_value(names: Any, name: str) -> Any:
    return names.get(_MISSING) if isinstance(names, contextvars.ContextVar) else names.get(name, _MISSING)


def _put_value(names: Any, name: str, value: Any) -> None:
    if _present_value(names, name) is value:  # classes forget what they have looked up with each assignment
        return
    if isinstance(names, contextvars.ContextVar):
        if value is not _MISSING:
            names.set(value)
    elif value is _MISSING:
        del names[name]
    else:
        names[name] = value


def _comparable_place(value: Any) -> Any:
    place = place_in_values(value)
    if not isinstance(place, list):
        return place
    line, names = place
    return line, [(name, repr(of) if isinstance(of, PLAIN) else id(of)) for name, of in names.items()]


def _content(holder: Any) -> _Content:
    if isinstance(holder, KEPT_IN_PLACE):
        return _Content({}, {}, keep_in_place(holder))
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
        return items if items is None or callable(items) else [replaced.get(id(item), item) for item in items]

    return _Content(*(mapped(items) for items in content))


def _put(holder: Any, content: _Content) -> None:
    if isinstance(holder, KEPT_IN_PLACE):
        if content.items is not None:
            content.items()
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


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Returns the attributes that code has given to a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in _Counted.__annotations__}


def put_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Gives a tensor those attributes and no others."""
    for name in attributes_of(tensor).keys() - attributes.keys():
        delattr(tensor, name)
    vars(tensor).update(attributes)


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
