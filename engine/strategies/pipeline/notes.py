"""The attributes that a step writes on a pipeline stage: what its units write, and what the code around them does.

A step has one segment for each stage: from its first unit to that of the next stage. Stage s runs the segments up to
its own, those of earlier stages without content, and its own for real.
"""

import collections
import contextvars
import functools
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from .absent import CutError, has_absent

__all__ = ["ABSENT", "REMEDY", "Key", "Notes", "Written"]

REMEDY = (
    "Have the block return the value and hand it on through the arguments of the blocks that follow, as in `x, aux ="
    " block(x, aux)`, or choose another strategy, such as 'fsdp'."
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
_NOT_THE_USERS = frozenset(nn.Module().__dict__) | frozenset(LightningModule().__dict__) | {"forward", "log"}
_MOST_DEEP = 3
"""Levels of objects and containers inside of each other that are looked at."""
_ANEW, ABSENT = -1, -2
"""Marks of an attribute that was given another value, and of one that has no content on the stage."""

Key = tuple[str, str]
"""The name of a module, and that of an attribute."""


class Written(NamedTuple):
    """The attributes that one stage has written in a step."""

    by_units: dict[Key, str]
    """Names of the units that have written each attribute."""
    around: dict[int, dict[Key, int]]
    """Maps each segment to what other code has written there: how often in place, or `_ANEW`, or `ABSENT`."""
    states: set[Key]
    """Attributes that are updated, rather than made anew: buffers, parameters, tensors in place, and numbers."""


class Notes:
    """Notes the attributes that the step of `module` writes on one stage, until `end`.

    Args:
        module: changed by the step.
        parameters: look at parameters too; FSDP puts others in their places.
    """

    def __init__(self, module: nn.Module, *, parameters: bool = True) -> None:
        self._module, self._parameters = module, parameters
        self._by_units: dict[Key, str] = {}
        self._around: dict[int, dict[Key, int]] = {}
        self._states: set[Key] = set()
        self._segment = 0
        self._of_units: set[Key] = set()
        """Attributes that units have written in this segment."""
        self._before = self._kept()

    def _kept(self, unit: nn.Module | None = None) -> dict[Key, Any]:
        """The module's attributes in the form of `_kept`, with the values of its buffers, or of a unit's alone."""
        owners = {*(self._module if unit is None else unit).modules()}
        return _kept(self._module, owners, parameters=self._parameters)

    def enter(self, segment: int) -> None:
        """The step has come to the first unit of a stage, whose segment begins."""
        if segment > self._segment:
            self._close()
            self._segment = segment

    def _close(self) -> None:
        after = self._kept()
        changed = _changed(self._before, after)
        self._states |= {key for key in changed if self._is_state(key, self._before.get(key), after[key])}
        self._around[self._segment] = {
            key: ABSENT if has_absent(_value(self._module, key)) else _times(self._before.get(key), after[key])
            for key in after
            if key in changed - self._of_units
        }
        self._before, self._of_units = after, set()

    def _is_state(self, key: Key, before: Any, after: Any) -> bool:
        part = self._module.get_submodule(key[0])
        if key[1] in part._buffers or key[1] in part._parameters:
            return True
        return _is_number(before) and _is_number(after) if isinstance(after, str) else _times(before, after) > 0

    @contextmanager
    def unit(self, name: str, unit: nn.Module, arguments: Any) -> Iterator[None]:
        """Around the forward of a unit.

        Raises:
            CutError: it writes what other stages can't be told of: into a list or dict that it is called with, or that
                a forward hook on a part of it has.
        """
        before = self._kept(unit), _form(arguments), _hooked(name, unit)
        yield
        changed = _changed(before[0], self._kept(unit))
        self._of_units |= changed
        self._by_units.update(dict.fromkeys(changed, name))
        if _form(arguments) != before[1]:
            raise CutError(
                f"{name!r} writes into a list or dict that it is called with, but the pipeline stages that skip it"
                f" have one of their own. {REMEDY}"
            )
        for where, form in _hooked(name, unit).items():
            if form != before[2].get(where):
                raise CutError(
                    f"{where}, which lies inside of a block, keeps what it is called with, but the pipeline stages that"
                    f" skip the block do not call it. {REMEDY}"
                )

    def end(self) -> Written:
        """Ends the last segment; returns the notes."""
        self._close()
        return Written(self._by_units, self._around, self._states)


def _kept(module: nn.Module, owners: Collection[nn.Module], *, parameters: bool) -> dict[Key, Any]:
    """The attributes of a module's parts, in a form that shows whether they were changed.

    Args:
        module: all of it.
        owners: parts of it of whose buffers the values are looked at too: a BatchNorm, and whoever writes to `.data`,
            leaves the version of a tensor what it was.
        parameters: whether they are looked at.
    """
    found: dict[Key, Any] = {
        (name, attribute): _form(value)
        for name, part in module.named_modules()
        if not isinstance(part, Metric)  # see `log.py`
        for attribute, value in part.__dict__.items()
        if attribute not in _NOT_THE_USERS
    }
    found |= {
        (name, key): (*_form(value), _sums(value)) if part in owners else _form(value)
        for name, part in module.named_modules()
        if not isinstance(part, Metric)
        for key, value in part._buffers.items()
        if value is not None
    }
    if parameters:  # those that are lent take the places of shapes
        found |= {
            (name, key): (nn.Parameter, 0 if value.is_meta or value.is_inference() else value._version)
            for name, part in module.named_modules()
            for key, value in part._parameters.items()
            if value is not None
        }
    return found


def _changed(before: dict[Key, Any], after: dict[Key, Any]) -> set[Key]:
    changed = {key for key, form in after.items() if key not in before or before[key] != form}
    # The mean of zeros, as of a trial run, changes nothing.
    means = ((name, "running_mean") for name, key in changed if key == "running_var")
    return changed.union(key for key in means if key in after)


def _sums(value: Tensor) -> tuple[float, ...]:
    """Sum and sum of squares of a tensor, to see whether its values change."""
    if value.is_meta or not value.numel():
        return ()
    values = (value.detach().abs() if value.is_complex() else value.detach()).double()
    return tuple(torch.stack([values.sum(), values.square().sum()]).tolist())


def _times(before: Any, after: Any) -> int:
    """Returns how often a tensor was written in place; `_ANEW` if it is another one, or no tensor."""
    if _is_of_tensor(before) and _is_of_tensor(after) and before[0] == after[0]:
        return after[1] - before[1]
    return _ANEW


def _is_of_tensor(form: Any) -> bool:
    return isinstance(form, tuple) and len(form) > 1 and isinstance(form[1], int)


def _is_number(form: Any) -> bool:
    """Whether a form is that of an int, a float or a complex number."""
    return isinstance(form, str) and form[:1] in "0123456789-(ni"


def _value(module: nn.Module, key: Key) -> Any:
    part = module.get_submodule(key[0])
    return next(table[key[1]] for table in (part.__dict__, part._buffers, part._parameters) if key[1] in table)


class _Same:
    """Equal to what holds the same object; keeps it alive, so that no other gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _form(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)  # NaN is not equal to itself
    same = _Same(value)
    if isinstance(value, Tensor):
        return same, None if value.is_inference() else value._version
    if depth == _MOST_DEEP:
        return same
    if type(value) in _CONTAINERS:
        items: Iterable[Any] = (*value, *value.values()) if isinstance(value, dict) else value
        # A tuple of plain values that is made anew, such as a shape, is what it was.
        return (None if isinstance(value, tuple) else same), [_form(item, depth + 1) for item in items]
    if _is_of_a_users_class(value):
        return same, _form(vars(value), depth + 1)
    return same


def _is_of_a_users_class(value: Any) -> bool:
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    package = type(value).__module__.split(".")[0]
    return hasattr(value, "__dict__") and package not in ("torch", "lightning", "builtins", __name__.split(".")[0])


def _hooked(name: str, unit: nn.Module) -> dict[str, Any]:
    """The objects that forward hooks on parts of a unit, and forwards put in the place of a part's, refer to."""
    found = {}
    for inner, part in unit.named_modules(prefix=name):
        if part is unit:  # whose own are called on all stages
            continue
        patched = [part.__dict__["forward"]] if "forward" in part.__dict__ else []
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *patched):
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                said = getattr(hook, "__qualname__", type(hook).__name__)
                found[f"the forward hook {said!r} on {inner!r}"] = [_form(value) for value in _held(hook)]
    return found


def _held(hook: Any) -> list[Any]:
    if isinstance(hook, functools.partial):
        return [*_held(hook.func), *hook.args, *hook.keywords.values()]
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType):
        return [hook]
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    values += [cell.cell_contents for cell in function.__closure__ or ()] + [getattr(hook, "__self__", None)]
    values = [value.get(None) if isinstance(value, contextvars.ContextVar) else value for value in values]
    return [value for value in values if type(value) in _CONTAINERS or _is_of_a_users_class(value)]
