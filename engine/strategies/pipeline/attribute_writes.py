"""Records the attributes that a step writes on a pipeline stage: those that units write, and those written around them.

A step has one segment for each stage: from the stage's first unit to that of the next stage. Stage s runs the segments
up to its own: those of earlier stages without content, and its own with real values.
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

from .remote_values import CutError, has_absent

__all__ = ["NO_CONTENT", "REMEDY", "Key", "StageWrites", "WriteRecorder"]

REMEDY = (
    "Have the block return the value and hand it on through the arguments of the blocks that follow, as in `x, aux ="
    " block(x, aux)`, or choose another strategy, such as 'fsdp'."
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
_NOT_THE_USERS = frozenset(nn.Module().__dict__) | frozenset(LightningModule().__dict__) | {"forward", "log"}
_MAX_DEPTH = 3
"""Levels of nested objects and containers that are compared."""
_REPLACED, NO_CONTENT = -1, -2
"""Marks of an attribute that was replaced by another object, and of one whose value has no content on the stage."""

Key = tuple[str, str]
"""The name of a sub-module, and the name of an attribute."""


class StageWrites(NamedTuple):
    """The attributes that one stage has written in a step."""

    by_units: dict[Key, str]
    """Maps an attribute to the name of the unit that has written it."""
    around: dict[int, dict[Key, int]]
    """For each segment, the attributes that other code has written: the number of writes in place, `_REPLACED` or
    `NO_CONTENT`."""
    states: set[Key]
    """Attributes that are updated rather than replaced: buffers, parameters, numbers, tensors written in place."""


class WriteRecorder:
    """Records the attributes of `module` that its step writes on one stage, until `end`.

    Args:
        module: changed by the step.
        parameters: record parameters too; not under FSDP, which replaces them.
    """

    def __init__(self, module: nn.Module, *, parameters: bool = True) -> None:
        self._module, self._parameters = module, parameters
        self._by_units: dict[Key, str] = {}
        self._around: dict[int, dict[Key, int]] = {}
        self._states: set[Key] = set()
        self._segment = 0
        self._of_units: set[Key] = set()
        """Attributes that units have written in this segment."""
        self._before = self._fingerprints()

    def _fingerprints(self, unit: nn.Module | None = None) -> dict[Key, Any]:
        """Returns the fingerprints of the module's attributes, with the values of all its buffers, or of a unit's."""
        owners = {*(self._module if unit is None else unit).modules()}
        return _fingerprints(self._module, owners, parameters=self._parameters)

    def enter(self, segment: int) -> None:
        """Called where the step comes to the first unit of a stage: the segment of that stage begins."""
        if segment > self._segment:
            self._close()
            self._segment = segment

    def _close(self) -> None:
        after = self._fingerprints()
        changed = _changed(self._before, after)
        self._states |= {key for key in changed if self._is_state(key, self._before.get(key), after[key])}
        self._around[self._segment] = {
            key: NO_CONTENT if has_absent(_value(self._module, key)) else _num_writes(self._before.get(key), after[key])
            for key in after
            if key in changed - self._of_units
        }
        self._before, self._of_units = after, set()

    def _is_state(self, key: Key, before: Any, after: Any) -> bool:
        part = self._module.get_submodule(key[0])
        if key[1] in part._buffers or key[1] in part._parameters:
            return True
        return _is_number(before) and _is_number(after) if isinstance(after, str) else _num_writes(before, after) > 0

    @contextmanager
    def unit(self, name: str, unit: nn.Module, arguments: Any) -> Iterator[None]:
        """Context around the forward of a unit.

        Raises:
            CutError: the unit writes where other stages can't see it: into a list or dict among its arguments, or into
                an object that a forward hook inside the unit refers to.
        """
        before = self._fingerprints(unit), _fingerprint(arguments), _hook_fingerprints(name, unit)
        yield
        changed = _changed(before[0], self._fingerprints(unit))
        self._of_units |= changed
        self._by_units.update(dict.fromkeys(changed, name))
        if _fingerprint(arguments) != before[1]:
            raise CutError(
                f"{name!r} writes into a list or dict that it is called with, but the pipeline stages that skip it"
                f" have one of their own. {REMEDY}"
            )
        for where, fingerprint in _hook_fingerprints(name, unit).items():
            if fingerprint != before[2].get(where):
                raise CutError(
                    f"{where}, which lies inside of a block, keeps what it is called with, but the pipeline stages that"
                    f" skip the block do not call it. {REMEDY}"
                )

    def end(self) -> StageWrites:
        """Ends the last segment; returns the record."""
        self._close()
        return StageWrites(self._by_units, self._around, self._states)


def _fingerprints(module: nn.Module, owners: Collection[nn.Module], *, parameters: bool) -> dict[Key, Any]:
    """Returns a fingerprint of each attribute of a module's parts: it differs if the attribute was written.

    Args:
        module: the whole module.
        owners: sub-modules whose buffers are compared by value too: BatchNorm and writes to `.data` do not change the
            version of a tensor.
        parameters: whether parameters are included.
    """
    fingerprints: dict[Key, Any] = {
        (name, attribute): _fingerprint(value)
        for name, submodule in module.named_modules()
        if not isinstance(submodule, Metric)  # see `log.py`
        for attribute, value in submodule.__dict__.items()
        if attribute not in _NOT_THE_USERS
    }
    fingerprints |= {
        (name, key): (*_fingerprint(value), _sums(value)) if submodule in owners else _fingerprint(value)
        for name, submodule in module.named_modules()
        if not isinstance(submodule, Metric)
        for key, value in submodule._buffers.items()
        if value is not None
    }
    if parameters:  # by version only: parameters that are lent replace shapes
        fingerprints |= {
            (name, key): (nn.Parameter, 0 if value.is_meta or value.is_inference() else value._version)
            for name, submodule in module.named_modules()
            for key, value in submodule._parameters.items()
            if value is not None
        }
    return fingerprints


def _changed(before: dict[Key, Any], after: dict[Key, Any]) -> set[Key]:
    changed = {key for key, fingerprint in after.items() if key not in before or before[key] != fingerprint}
    # A running mean stays as it is for the zeros of a trial run.
    means = ((name, "running_mean") for name, key in changed if key == "running_var")
    return changed.union(key for key in means if key in after)


def _sums(value: Tensor) -> tuple[float, ...]:
    """Returns sum and sum of squares of a tensor, which differ if its values change."""
    if value.is_meta or not value.numel():
        return ()
    values = (value.detach().abs() if value.is_complex() else value.detach()).double()
    return tuple(torch.stack([values.sum(), values.square().sum()]).tolist())


def _num_writes(before: Any, after: Any) -> int:
    """Returns how often a tensor was written in place; `_REPLACED` if it is another one, or no tensor."""
    if _is_of_tensor(before) and _is_of_tensor(after) and before[0] == after[0]:
        return after[1] - before[1]
    return _REPLACED


def _is_of_tensor(fingerprint: Any) -> bool:
    return isinstance(fingerprint, tuple) and len(fingerprint) > 1 and isinstance(fingerprint[1], int)


def _is_number(fingerprint: Any) -> bool:
    """Whether a fingerprint is that of an int, a float or a complex number."""
    return isinstance(fingerprint, str) and fingerprint[:1] in "0123456789-(ni"


def _value(module: nn.Module, key: Key) -> Any:
    part = module.get_submodule(key[0])
    return next(table[key[1]] for table in (part.__dict__, part._buffers, part._parameters) if key[1] in table)


class _Same:
    """Compares by identity; keeps the object alive, so that no other object gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _fingerprint(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)  # NaN is not equal to itself
    same = _Same(value)
    if isinstance(value, Tensor):
        return same, None if value.is_inference() else value._version
    if depth == _MAX_DEPTH:
        return same
    if type(value) in _CONTAINERS:
        items: Iterable[Any] = (*value, *value.values()) if isinstance(value, dict) else value
        # Tuples, such as shapes, are equal if their values are; other containers only if they are the same object.
        return (None if isinstance(value, tuple) else same), [_fingerprint(item, depth + 1) for item in items]
    if _is_of_a_users_class(value):
        return same, _fingerprint(vars(value), depth + 1)
    return same


def _is_of_a_users_class(value: Any) -> bool:
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    package = type(value).__module__.split(".")[0]
    return hasattr(value, "__dict__") and package not in ("torch", "lightning", "builtins", __name__.split(".")[0])


def _hook_fingerprints(name: str, unit: nn.Module) -> dict[str, Any]:
    """Returns fingerprints of the objects that forward hooks and replaced forwards inside a unit refer to."""
    fingerprints = {}
    for inner, submodule in unit.named_modules(prefix=name):
        if submodule is unit:  # the hooks of the unit itself run on all stages
            continue
        patched = [submodule.__dict__["forward"]] if "forward" in submodule.__dict__ else []
        for hook in (*submodule._forward_hooks.values(), *submodule._forward_pre_hooks.values(), *patched):
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                hook_name = getattr(hook, "__qualname__", type(hook).__name__)
                values = [_fingerprint(value) for value in _referenced(hook)]
                fingerprints[f"the forward hook {hook_name!r} on {inner!r}"] = values
    return fingerprints


def _referenced(hook: Any) -> list[Any]:
    """Returns the containers and objects of users' classes that a hook refers to: globals, closure, `self`."""
    if isinstance(hook, functools.partial):
        return [*_referenced(hook.func), *hook.args, *hook.keywords.values()]
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType):
        return [hook]
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    values += [cell.cell_contents for cell in function.__closure__ or ()] + [getattr(hook, "__self__", None)]
    values = [value.get(None) if isinstance(value, contextvars.ContextVar) else value for value in values]
    return [value for value in values if type(value) in _CONTAINERS or _is_of_a_users_class(value)]
