"""The state that the code of a module can reach: what it is now, and how to put it back.

The attributes of the module and its sub-modules, and what lies in them: containers, objects of users' classes,
generators. Beside them what its code names: attributes of classes, globals, the variables and defaults of functions and
of hooks. State of torch, Lightning and the standard library is left out, except where it is a container or a generator.
"""

import argparse
import collections
import contextvars
import functools
import itertools
import random
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from ..callers import LIBRARIES, NOT_THE_USERS, names_in
from ..contents import KEPT_IN_PLACE, PLAIN, keep_in_place, place_in_values
from ..step_guard import StepSnapshot

__all__ = [
    "NOT_THE_USERS_ATTRIBUTES",
    "Code",
    "Place",
    "ReachableState",
    "Touched",
    "Walk",
    "code_of",
    "hooks_of",
    "is_of_a_users_class",
    "named_tables",
    "snapshot_outside",
    "sums",
]

NOT_THE_USERS_ATTRIBUTES = frozenset(nn.Module().__dict__) | frozenset(LightningModule().__dict__) | {"forward", "log"}
"""Attributes of every module, and those that a pipeline replaces."""
_HOLDERS = types.SimpleNamespace, argparse.Namespace
"""Classes of the standard library that users keep values in."""
_CODE = types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, property, staticmethod, classmethod
_MAX_DEPTH = 8
"""Levels of nested objects and containers that are compared; deeper ones belong to libraries."""
_MAX_CALLS = 3
"""How far functions are followed to those that they name: a step, its block, a helper of that."""
_MAX_ITEMS = 10_000
"""Longer containers are data: only their lengths are compared. So are places with more objects and containers than that
(a library's registry, the tests that pytest runs): what is first seen after these is not compared."""
_MAX_TOUCHED = 100
"""The most items of a container that are looked at in each batch."""
_MAX_KEPT_BYTES = 2**20
"""The largest tensor outside of modules whose values are kept for `snapshot_outside`: larger ones are data."""
_MAX_VALUES = 1_000_000
"""Larger arrays of numpy are compared by every second or third value, and so on."""
_ROUNDING = 1e-6
"""Relative difference of sums that is none: the order of additions on an accelerator is not always the same."""


class Place(NamedTuple):
    """Where a value is kept."""

    owner: str
    """The name of a sub-module, or other words."""
    name: str
    """The name of the attribute, global or variable."""
    kind: str = "attribute"
    """The kind of place, in a word or two."""

    def text(self, module: nn.Module) -> str:
        """Names the place, for a message about a module."""
        if self.kind not in ("attribute", "buffer", "parameter"):
            return f"the {self.kind} {self.name!r} of {self.owner}"
        if not self.owner:
            return f"the {self.kind} {self.name!r} of {type(module).__name__}"
        return f"the {self.kind} {f'{self.owner}.{self.name}'!r}"


class _Sums:
    """Sum and sum of squares of a tensor, which are equal if they differ by rounding only."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, total: float, squares: float, rounding: float) -> None:
        self._count, self._total, self._squares, self._rounding = count, total, squares, rounding

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Sums):
            return False
        if repr((self._total, self._squares)) == repr((other._total, other._squares)):  # NaN is not equal to itself
            return True
        largest = max(self._squares, other._squares)
        # |total| <= sqrt(count * squares), so that sums near zero are compared with what they are sums of.
        return (
            abs(self._squares - other._squares) <= self._rounding * largest
            and abs(self._total - other._total) <= self._rounding * (self._count * largest) ** 0.5
        )


class ReachableState:
    """The state that the code of a module can reach, from now on.

    Args:
        module: the module, whose code is followed once; its attributes are looked up each time.
        parameters: whether parameters count; not under FSDP, which replaces them.
    """

    def __init__(self, module: nn.Module, *, parameters: bool = True) -> None:
        self._module, self._parameters = module, parameters
        self._tables = named_tables(module)
        self._modules = frozenset(map(id, module.modules()))

    def marks(self) -> dict[Place, Any]:
        """Returns a mark for each place, equal to a later one if the values there are equal."""
        walk = Walk(self._modules)
        marks = {place: walk.mark(value) for place, value in self._values()}
        if self._parameters:
            for name, part in self._module.named_modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None and not parameter.is_meta:
                        marks[Place(name, key, "parameter")] = walk.mark_tensor(parameter)
        return marks

    def marks_outside(self) -> dict[Place, Any]:
        """Returns the marks of what is kept outside of modules: by classes, as globals, in functions."""
        return Walk(self._modules).marks_in(self._tables)

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that puts everything back that can be: not generators, nor tensors of globals."""
        of_modules = StepSnapshot(self._module, random=False)
        walk = Walk(self._modules)
        for _, value in self._values():
            walk.mark(value)
        # A step may register its hooks once, and note that in an attribute.
        hooks = [table for part in self._module.modules() if not isinstance(part, Metric) for table in hooks_of(part)]
        contents = [(container, _content_of(container)) for container in (*walk.containers, *hooks)]
        put_names = _names_kept(self._tables)

        def undo() -> None:
            put_names()
            for container, content in contents:
                _refill(container, content)
            of_modules.undo()

        return undo

    def _values(self) -> Iterator[tuple[Place, Any]]:
        for name, part in self._module.named_modules():
            if isinstance(part, Metric):  # counts micro-batches as it counts batches; see `log.py`
                continue
            for attribute, value in part.__dict__.items():
                if attribute not in NOT_THE_USERS_ATTRIBUTES:
                    yield Place(name, attribute), value
            for attribute, value in part._buffers.items():
                if value is not None:
                    yield Place(name, attribute, "buffer"), value
        for place, table in self._tables.items():
            if place.name in table:
                yield place, table[place.name]


class Touched:
    """The attributes of a module's parts, of users' classes, that a batch has written: seen without their values.

    A batch takes a microsecond for each attribute. What lies deeper than an attribute's own items is not seen.

    Args:
        module: the module, whose parts are looked up once.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        self._parts = {n: part for n, part in parts.items() if type(part).__module__.split(".")[0] not in LIBRARIES}
        self.seen: set[Place] = set()
        """The places that were written in an earlier batch."""
        self._before: dict[Place, Any] = {}

    def begin(self) -> None:
        """Called before a batch."""
        self._before = self._marks()

    def end(self) -> set[Place]:
        """Called after a batch; returns the places that it has written."""
        before, self._before = self._before, {}
        return {place for place, mark in self._marks().items() if before.get(place) != mark}

    def _marks(self) -> dict[Place, Any]:
        return {
            Place(name, key): _touched(value)
            for name, part in self._parts.items()
            for key, value in part.__dict__.items()
            if key not in NOT_THE_USERS_ATTRIBUTES
        }


def _touched(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (list, tuple, set, dict, collections.deque)):
        items = value.values() if isinstance(value, dict) else value
        return id(value), len(value), [id(item) for item in itertools.islice(items, _MAX_TOUCHED)]
    if isinstance(value, nn.Module) or not is_of_a_users_class(value):
        return id(value)
    return id(value), [(name, id(item)) for name, item in getattr(value, "__dict__", {}).items()]


def snapshot_outside(*modules: nn.Module) -> Callable[[], None]:
    """Returns a function that puts back what the modules' code can reach outside of modules.

    That is what a step of a copy shares with the module that it is a copy of: attributes of classes, globals, variables
    of functions, with their containers, generators, and tensors and arrays that are no data.
    """
    walk = Walk(frozenset(id(part) for module in modules for part in module.modules()))
    put_names = []
    for module in modules:
        tables = named_tables(module)
        walk.marks_in(tables)
        put_names.append(_names_kept(tables))
    contents = [(container, _content_of(container)) for container in walk.containers]
    restore = [keep for value in walk.seen if (keep := _kept_state(value)) is not None]

    def undo() -> None:
        for put in put_names:
            put()
        for container, content in contents:
            _refill(container, content)
        for put in restore:
            put()

    return undo


def _names_kept(tables: Mapping[Place, Any]) -> Callable[[], None]:
    """Returns a function that gives the names in `tables` the values that they have now."""
    values = [(table, place.name, table[place.name]) for place, table in tables.items() if place.name in table]

    def put() -> None:
        for table, name, value in values:
            if table.get(name) is not value:
                table[name] = value

    return put


def _kept_state(value: Any) -> Callable[[], None] | None:
    """Returns a function that puts back a generator, or a tensor or array that is not large; None for others."""
    if isinstance(value, KEPT_IN_PLACE):
        return keep_in_place(value)
    if isinstance(value, Tensor) and not value.requires_grad and value.layout == torch.strided:
        if value.is_meta or value.is_inference() or value.nbytes > _MAX_KEPT_BYTES:
            return None
        kept, version = value.detach().clone(), value._version
        return lambda: None if value._version == version else _put_back(value, kept)
    return None


@torch.no_grad()
def _put_back(tensor: Tensor, values: Tensor) -> None:
    if tensor.shape == values.shape:
        tensor.copy_(values)


class Walk:
    """Marks values, and collects the containers and attribute tables that it comes through.

    Args:
        modules: the ids of modules that have marks of their own.
    """

    def __init__(self, modules: Collection[int]) -> None:
        self._modules = modules
        self._numbers: dict[int, int] = {}
        """The order of the objects and containers of the present place, by their ids."""
        self._alive: list[Any] = []
        self.containers: list[Any] = []
        self.seen: list[Any] = []
        """The tensors, arrays and generators that it has come through."""

    def marks_in(self, tables: Mapping[Place, Any]) -> dict[Place, Any]:
        """Returns the mark of each place, in the table that has its value."""
        return {place: self.mark(table[place.name]) for place, table in tables.items() if place.name in table}

    def mark(self, value: Any, depth: int = 0) -> Any:
        """Returns the mark of a value."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)  # NaN is not equal to itself
        if not depth:
            self._numbers, self._alive = {}, []
        # What is seen again has a number in place of its mark: the marks of objects that refer to each other would else
        # repeat each other without end, or nearly so.
        if (number := self._numbers.get(id(value))) is not None:
            return "seen", number
        if depth > _MAX_DEPTH or len(self._numbers) > _MAX_ITEMS:
            return None
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)  # so that no other object gets its id
        return self._mark(value, depth + 1)

    def _mark(self, value: Any, depth: int) -> Any:
        if isinstance(value, (Tensor, *KEPT_IN_PLACE)):
            self.seen.append(value)
        if isinstance(value, Tensor):
            return None if isinstance(value, nn.Parameter) else self.mark_tensor(value)
        if isinstance(value, np.ndarray):
            few = value.reshape(-1)[:: 1 + value.size // _MAX_VALUES]
            return value.shape, str(value.dtype), None if value.dtype.hasobject else zlib.crc32(few.tobytes())
        if isinstance(value, (list, tuple, set, frozenset, dict, collections.deque)):
            return self._mark_container(value, depth)
        if isinstance(value, contextvars.ContextVar):
            return self.mark(value.get(None), depth)
        if (state := _generator_state(value)) is not None:
            return self.mark(state, depth)
        if isinstance(value, nn.Module):
            return None if id(value) in self._modules else self._mark_attributes(value, depth)
        if is_of_a_users_class(value):
            return self._mark_attributes(value, depth)
        return None

    def _mark_container(self, value: Any, depth: int) -> Any:
        if not isinstance(value, (tuple, frozenset)):
            self.containers.append(value)
        if len(value) > _MAX_ITEMS:
            return type(value).__name__, len(value)
        if isinstance(value, dict):
            # Keys may be modules or parameters, whose order says as much as their names.
            return [(self.mark(key, depth), self.mark(item, depth)) for key, item in dict.items(value)]
        if isinstance(value, (set, frozenset)):  # in an order that lasts, since marks have numbers
            return sorted(repr(self.mark(item, depth)) for item in sorted(value, key=id))
        return [self.mark(item, depth) for item in value]

    def _mark_attributes(self, value: Any, depth: int) -> Any:
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        self.containers.append(attributes)
        mark = [
            (name, self.mark(item, depth))
            for name, item in attributes.items()
            if not isinstance(value, nn.Module) or name == "_buffers" or name not in NOT_THE_USERS_ATTRIBUTES
        ]
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if type(name) is str]
        return mark + [(name, self.mark(getattr(value, name, None), depth)) for name in slots if name[:2] != "__"]

    @staticmethod
    def mark_tensor(value: Tensor) -> Any:
        """Returns the mark of a tensor: its form, and sums of its values."""
        return tuple(value.shape), value.dtype, sums(value)


def sums(value: Tensor, rounding: float = _ROUNDING) -> Any:
    """Returns something that differs if a tensor's values differ; None for one without content."""
    value = value.detach()
    if value.is_meta or not value.numel() or value.layout != torch.strided or value.is_quantized:
        return None
    value = torch.view_as_real(value) if value.is_complex() else value
    value = value if value.is_floating_point() else value.double()
    with torch.no_grad():
        total, norm = (value.sum(dtype=torch.float64), torch.linalg.vector_norm(value, dtype=torch.float64))
    return _Sums(value.numel(), float(total), float(norm) ** 2, rounding)


def _generator_state(value: Any) -> Any:
    """Returns how far a generator or an iterator has come; None for anything else."""
    if isinstance(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return place_in_values(value)


def is_of_a_users_class(value: Any) -> bool:
    """Whether a value is an object with attributes of a class that the user, or another library, has written."""
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return type(value).__module__.split(".")[0] not in LIBRARIES or isinstance(value, _HOLDERS)


def _content_of(container: Any) -> Any:
    # By dict's own method: that of a subclass may make its values anew (transformers' table of activations).
    return dict(dict.items(container)) if isinstance(container, dict) else list(container)


def _refill(container: Any, content: Any) -> None:
    """Gives a container, or the attributes of an object, its content back, if it has another one."""
    present = _content_of(container)
    if len(present) == len(content) and all(
        a is b and (not isinstance(content, dict) or present[a] is content[b])
        for a, b in zip(present, content, strict=True)
    ):
        return
    container.clear()
    (container.extend if isinstance(container, (list, collections.deque)) else container.update)(content)


class _Cells(MutableMapping[str, Any]):
    """The variables of enclosing functions that a function uses."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError as error:  # not assigned yet
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _ClassAttributes(MutableMapping[str, Any]):
    """The attributes of a class, which are written through the class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._kind))

    def __len__(self) -> int:
        return len(vars(self._kind))


class Code:
    """Follows functions and classes of the user to the tables of names that they use."""

    def __init__(self) -> None:
        self.tables: dict[Place, Any] = {}
        self.modules: list[nn.Module] = []
        """The modules that have a name in code, which may belong to no other."""
        self._seen: set[int] = set()

    def follow(self, value: Any, depth: int = 0) -> None:
        """Follows a function, a class, or what refers to one."""
        if id(value) in self._seen or depth > _MAX_CALLS:
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.follow(item, depth)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self.follow(value.__func__, depth)
        elif isinstance(value, property):
            self.follow(value.fget, depth)
        elif isinstance(value, type):
            self._follow_class(value, depth)
        elif isinstance(value, types.FunctionType):
            self._follow_function(value, depth)

    def follow_hook(self, hook: Any, owner: str) -> None:
        """Follows a hook on the module `owner`: a function with arguments of its own, or an object with state."""
        while isinstance(hook, functools.partial):
            arguments = dict(enumerate(hook.args)) | hook.keywords
            for key, value in arguments.items():
                name = f"argument {key}"
                self._see(Place(f"a hook on {owner!r}", name, "variable"), value, {name: value}, 0)
            hook = hook.func
        self.follow(hook if isinstance(hook, _CODE) else type(hook))
        kept = getattr(hook, "__self__", None) if isinstance(hook, _CODE) else hook
        if is_of_a_users_class(kept):
            name = type(kept).__name__
            self._add(Place(f"the module {owner!r}", name, "hook"), {name: kept})

    def _add(self, place: Place, table: Any) -> None:
        """Adds a place, by another name if it is that of another table: two functions or classes may have one name."""
        while self.tables.setdefault(place, table) is not table:
            place = place._replace(owner=f"{place.owner}'")

    def _follow_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if base.__module__.split(".")[0] in LIBRARIES:
                continue
            attributes = _ClassAttributes(base)
            for name, value in list(attributes.items()):
                is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
                # Not all classes that a library's class names.
                if is_code or (isinstance(value, type) and value.__module__ == base.__module__):
                    self.follow(value, depth)
                elif _may_change(name, value):
                    self._add(Place(base.__qualname__, name, "class attribute"), attributes)

    def _follow_function(self, function: types.FunctionType, depth: int) -> None:
        if function.__code__.co_filename.startswith(NOT_THE_USERS):
            return
        module = function.__module__ or ""
        if module.split(".")[0] in LIBRARIES:
            return
        if (inner := getattr(function, "__wrapped__", None)) is not None:
            self.follow(inner, depth)
        cells = _Cells(function)
        for name, value in list(cells.items()):
            self._see(Place(function.__qualname__, name, "variable"), value, cells, depth)
        for name, value in function.__dict__.items():
            self._see(Place(function.__qualname__, name, "function attribute"), value, function.__dict__, depth)
        defaults = {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
        defaults |= function.__kwdefaults__ or {}
        for name, value in defaults.items():
            self._see(Place(function.__qualname__, name, "default argument"), value, defaults, depth)
        names = names_in(function.__code__)
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                table = vars(value) if value.__name__.split(".")[0] not in LIBRARIES else {}
                for attribute in names & table.keys():
                    self._see(Place(value.__name__, attribute, "global"), table[attribute], table, depth)
            else:
                self._see(Place(module, name, "global"), value, function.__globals__, depth)

    def _see(self, place: Place, value: Any, table: Any, depth: int) -> None:
        if _may_change(place.name, value):
            self._add(place, table)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        self.follow(value if isinstance(value, _CODE) else type(value), depth + 1)


def _may_change(name: str, value: Any) -> bool:
    """Whether a name of a class or of code may stand for state."""
    return not name.startswith("__") and not isinstance(value, (*_CODE, types.ModuleType, nn.Module))


def named_tables(module: nn.Module) -> dict[Place, Any]:
    """Returns, for each name outside of modules that their code uses, the table that has its value."""
    return code_of(module).tables


def code_of(module: nn.Module) -> Code:
    """Follows the code of a module and its sub-modules, and of their hooks."""
    code = Code()
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        code.follow(type(part))
        forward = part.__dict__.get("forward")
        while hasattr(forward, "original"):  # one that a strategy has put around it
            forward = forward.original
        code.follow(forward)
        for attribute, value in part.__dict__.items():  # functions and objects that its code may call
            if attribute in NOT_THE_USERS_ATTRIBUTES or isinstance(value, PLAIN):
                continue
            if isinstance(value, (*_CODE, functools.partial)):
                code.follow(value, 1)
            elif callable(value) or type(value).__module__ == type(part).__module__:  # not all of a library's
                code.follow(type(value), 1)
        for hook in (hook for table in hooks_of(part) for hook in table.values()):
            code.follow_hook(hook, name)
    return code


def hooks_of(part: nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns the tables of the hooks on the forward and the backward of a module."""
    return part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks
