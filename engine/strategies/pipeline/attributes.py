"""Attributes that a step writes on one pipeline stage and that code reads on another, which does not have them.

A stage skips the units of others. What these keep on themselves or on other objects (an auxiliary loss, a router's
logits, a running statistic) is missing there, or is that of an earlier batch; and what the step writes behind the units
is on the last stage only. `Notes` finds out what is written, in a trial run on all stages but the last and in the
first micro-batch on that one. From then on `Readers` raises an error where user code reads such an attribute on another
stage.
"""

import collections
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from .absent import CutError, has_absent, is_users, users_line

__all__ = ["Key", "Notes", "Readers", "Written"]

_REMEDY = (
    "Have the block return the value and hand it on through the arguments of the blocks that follow, as in `x, aux ="
    " block(x, aux)`, or choose another strategy, such as 'fsdp'."
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
_NOT_THE_USERS = frozenset(nn.Module().__dict__) | frozenset(LightningModule().__dict__) | {"forward", "log"}
_MOST_DEEP = 3
"""Levels of objects and containers inside of each other that are looked at."""

Key = tuple[str, str]
"""The name of a module, and that of an attribute."""


class Written(NamedTuple):
    """What one stage has written in a step."""

    by_units: dict[Key, str]
    """What its units have written, with the name of the unit."""
    around: set[Key]
    """What other code has written that has content on this stage."""


class Notes:
    """What the step of `module` writes, from `begin` to `end`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_units: dict[Key, str] = {}
        self._first = _kept(module)

    @contextmanager
    def unit(self, name: str, unit: nn.Module, arguments: Any) -> Iterator[None]:
        """Around the forward of a unit.

        Raises:
            CutError: it writes what other stages can't be told of: into a list or dict that it is called with, or that
                a forward hook on a part of it has.
        """
        before = _kept(self._module), _form(arguments), _hooked(name, unit)
        yield
        self._by_units.update(dict.fromkeys(_changed(before[0], _kept(self._module)), name))
        if _form(arguments) != before[1]:
            raise CutError(
                f"{name!r} writes into a list or dict that it is called with, but the pipeline stages that skip it"
                f" have one of their own. {_REMEDY}"
            )
        for where, form in _hooked(name, unit).items():
            if form != before[2].get(where):
                raise CutError(
                    f"{where}, which lies inside of a block, keeps what it is called with, but the pipeline stages that"
                    f" skip the block do not call it. {_REMEDY}"
                )

    def end(self) -> Written:
        """What was written."""
        changed = _changed(self._first, _kept(self._module)) - set(self._by_units)
        return Written(self._by_units, {key for key in changed if not has_absent(_value(self._module, key))})


class Readers:
    """Raises an error where user code reads an attribute that only another stage has written.

    Args:
        module: changed in place where that is found out.
        own_stages: those of this rank.
        present_stage: the stage that runs, or None outside of a step.
    """

    def __init__(self, module: nn.Module, own_stages: set[int], present_stage: Callable[[], int | None]) -> None:
        self._module, self._own_stages, self._present_stage = module, own_stages, present_stage
        self.inside = False
        """Whether a unit of the stage runs, which may read all that it writes."""
        self._having: dict[Key, set[int]] = {}
        self._writers: dict[Key, str] = {}
        self._kinds: dict[nn.Module, type] = {}
        self._around: dict[str, dict[int, set[Key]]] = collections.defaultdict(dict)

    def learn(self, step: str, stage: int, written: Written, num_stages: int) -> None:
        """Told on all ranks what `stage` writes in a step, the last stage last."""
        for key, unit in written.by_units.items():
            stages = self._having.setdefault(key, {stage})
            if stage not in stages:
                stages.clear()  # each has a part of it
            self._writers.setdefault(key, f"the block {unit!r}")
        around = self._around[step]
        around[stage] = written.around
        if stage == num_stages - 1:
            for key in set().union(*around.values()):
                stages = {number for number, keys in around.items() if key in keys}
                if key not in self._having and len(stages) < num_stages:
                    self._having[key] = stages
                    self._writers[key] = f"`{step}`"
        self._watch()

    @property
    def written(self) -> set[Key]:
        """What is known to be written, on any stage."""
        return set(self._writers)

    def _watch(self) -> None:
        parts = dict(self._module.named_modules())
        for name, _ in self._having:
            part = parts[name]
            if part not in self._kinds:
                self._kinds[part] = type(part)
                part.__class__ = _watched(type(part), functools.partial(self._check, name))

    def _check(self, part: str, attribute: str) -> None:
        having = self._having.get((part, attribute))
        # Called by `__getattribute__`, and that by whoever reads.
        if having is None or self.inside or not is_users(sys._getframe(2)):
            return
        stage = self._present_stage()
        if (self._own_stages if stage is None else {stage}) & having:
            return
        owner = repr(part) if part else type(self._module).__name__
        raise CutError(
            f"{users_line()} reads {attribute!r} of {owner}, which {self._writers[part, attribute]} writes on another"
            f" pipeline stage. {_REMEDY if self._writers[part, attribute].startswith('the block') else _RETURN}"
        )

    def close(self) -> None:
        """Has the modules be of their own classes again."""
        for part, kind in self._kinds.items():
            part.__class__ = kind
        for known in (self._kinds, self._having, self._writers, self._around):
            known.clear()


_RETURN = (
    "Log it with `self.log`, or return it from the step and take it from the `outputs` of the hook at the batch's end:"
    " these are the same on all stages."
)


def _watched(kind: Any, check: Callable[[str], None]) -> type:
    def read(self: Any, name: str) -> Any:
        check(name)
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(names))


def _kept(module: nn.Module) -> dict[Key, Any]:
    """What the parts of a module keep, in a form that shows whether it was changed."""
    return {
        (name, attribute): _form(value)
        for name, part in module.named_modules()
        if not isinstance(part, Metric)  # see `log.py`
        for attributes in (part.__dict__, part._buffers)
        for attribute, value in attributes.items()
        if attribute not in _NOT_THE_USERS
    }


def _changed(before: dict[Key, Any], after: dict[Key, Any]) -> set[Key]:
    return {key for key, form in after.items() if key not in before or before[key] != form}


def _value(module: nn.Module, key: Key) -> Any:
    part = module.get_submodule(key[0])
    return part.__dict__[key[1]] if key[1] in part.__dict__ else part._buffers[key[1]]


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
    """What forward hooks on parts of a unit hold on to, and forwards that others have put in the place of a part's."""
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
