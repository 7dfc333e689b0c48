"""Attributes that a step writes on one pipeline stage and that code reads on another, which does not have them.

A stage skips the units of others. What these keep on themselves or on other objects (an auxiliary loss, a router's
logits, a running statistic) is missing there, or is that of an earlier batch; and what the step writes behind the units
is on the last stage only. `Notes` finds out what is written, in a trial run on all stages but the last and in the
first micro-batch on that one. From then on `Readers` raises an error where user code reads such an attribute on another
stage. State that two stages write (the statistics of a BatchNorm that is called before and behind the units) is right
on neither: that ends the run before its first optimizer step.

A step has one segment for each stage: from its first unit to that of the next stage. Stage s runs the segments up to
its own, those of earlier stages without content, and its own for real. So a stage has the right value of an attribute
if it runs all segments in which the attribute is written, and writes there what the segment's own stage does.
"""

import collections
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .absent import CutError, is_users, users_line
from .notes import ABSENT, REMEDY, Key, Written
from .plan import Plan

__all__ = ["Readers"]

_SEPARATE = (
    "Have each place use a module of its own; or give the module a method pipeline_stages() that puts all that use this"
    " one into one stage; or choose another strategy, such as 'fsdp'."
)
_RETURN = (
    "Log it with `self.log`, or return it from the step and take it from the `outputs` of the hook at the batch's end:"
    " these are the same on all stages."
)


class Readers:
    """Raises an error where user code reads an attribute that only another stage has written.

    Args:
        module: changed in place where that is found out.
        plan: says which stages hold a parameter.
        own_stages: those of this rank.
        present_stage: the stage that runs, or None outside of a step.
        is_live: whether the step has come to that stage's own part.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        own_stages: set[int],
        present_stage: Callable[[], int | None],
        is_live: Callable[[], bool],
    ) -> None:
        self._module, self._plan = module, plan
        self._own_stages, self._present_stage, self._is_live = own_stages, present_stage, is_live
        self.inside = False
        """Whether a unit of the stage runs, which may read all that it writes."""
        self._having: dict[Key, set[int]] = {}
        self._writers: dict[Key, str] = {}
        self._kinds: dict[nn.Module, type] = {}
        self._told: dict[str, dict[int, Written]] = collections.defaultdict(dict)
        self._right: dict[Key, set[int]] = {}
        """Stages that have the right value after any step."""
        self._writing: dict[Key, dict[int, str]] = {}
        """Stages that write it, and what does."""

    def learn(self, step: str, stage: int, written: Written, num_stages: int) -> None:
        """Told on all ranks what `stage` writes in a step, the last stage last.

        Raises:
            CutError: several stages write the same state, so that none has what one process would.
        """
        for key, unit in written.by_units.items():
            stages = self._having.setdefault(key, {stage})
            if stage not in stages:
                stages.clear()  # each has a part of it
            self._writers.setdefault(key, f"the block {unit!r}")
        told = self._told[step]
        told[stage] = written
        if stage == num_stages - 1:
            around = [key for each in told.values() for marks in each.around.values() for key in marks]
            for key in dict.fromkeys([*around, *(key for each in told.values() for key in each.by_units)]):
                self._settle(step, key, told)
        self._watch()

    def _settle(self, step: str, key: Key, told: dict[int, Written]) -> None:
        """Finds out which stages have the right value of what was written, when all have told."""
        segments = [stage for stage, each in told.items() if key in each.by_units or key in each.around.get(stage, {})]
        if not segments:
            return
        having = {stage for stage in told if all(_has_seen(told, key, segment, stage) for segment in segments)}
        having &= self._right.get(key, having)  # of other steps
        self._right[key] = having
        writing = self._writing.setdefault(key, {})
        for stage in segments:
            unit = told[stage].by_units.get(key)
            writing.setdefault(stage, f"`{step}`" if unit is None else f"the block {unit!r}")
        parameter = self._module.get_submodule(key[0])._parameters.get(key[1])
        needed = {*writing, *(() if parameter is None else self._plan.holders[parameter])}
        if not needed <= having and any(key in each.states for each in told.values()):
            raise CutError(self._why_torn(key, writing))
        if len(having) < len(told):
            self._having[key] = having
            self._writers.setdefault(key, writing[segments[0]])

    def _why_torn(self, key: Key, writing: dict[int, str]) -> str:
        part, name = self._module.get_submodule(key[0]), ".".join(filter(None, key))
        kind = "buffer" if key[1] in part._buffers else "parameter" if key[1] in part._parameters else "attribute"
        said = " and ".join(f"{code} on pipeline stage {stage}" for stage, code in sorted(writing.items()))
        return (
            f"the {kind} {name!r} of {type(part).__name__} is written by {said}, and each stage has a copy of its own,"
            f" so that none has the value that one process has. {_SEPARATE}"
        )

    @property
    def written(self) -> set[Key]:
        """The attributes that are known to be written, on any stage."""
        return set(self._writers)

    def buffer_stages(self) -> dict[str, int]:
        """Maps the name of each buffer that is written to a stage that has what was written."""
        parts = dict(self._module.named_modules())
        return {
            f"{name}.{attribute}" if name else attribute: min(stages)
            for (name, attribute), stages in self._having.items()
            if attribute in parts[name]._buffers and stages
        }

    def _watch(self) -> None:
        parts = dict(self._module.named_modules())
        for name, _ in self._having:
            part = parts[name]
            if part not in self._kinds:
                self._kinds[part] = type(part)
                part.__class__ = _watched(type(part), functools.partial(self._check, name))

    def _check(self, part: str, attribute: str) -> None:
        having = self._having.get((part, attribute))
        if having is None:
            return
        stage = self._present_stage()
        # Called by `__getattribute__`, and that by whoever reads: a module of torch's for its own part of a step.
        if not (by_user := is_users(sys._getframe(2))):
            if stage is None or not self._is_live() or attribute not in self._module.get_submodule(part)._buffers:
                return
        elif self.inside:
            return
        if (self._own_stages if stage is None else {stage}) & having:
            return
        owner = repr(part) if part else type(self._module).__name__
        writer = self._writers[part, attribute]
        remedy = _SEPARATE if not by_user else REMEDY if writer.startswith("the block") else _RETURN
        raise CutError(
            f"{users_line()} reads {attribute!r} of {owner}, which {writer} writes on another pipeline stage. {remedy}"
        )

    def close(self) -> None:
        """Has the modules be of their own classes again."""
        for part, kind in self._kinds.items():
            part.__class__ = kind
        for known in (self._kinds, self._having, self._writers, self._told, self._right, self._writing):
            known.clear()


def _watched(kind: Any, check: Callable[[str], None]) -> type:
    def read(self: Any, name: str) -> Any:
        check(name)
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(names))


def _has_seen(told: dict[int, Written], key: Key, segment: int, stage: int) -> bool:
    """Whether `stage` has of a segment what the segment's own stage has written there."""
    own = told[segment]
    if segment >= stage:
        return segment == stage and own.around.get(segment, {}).get(key) != ABSENT
    return (
        key not in own.by_units and told[stage].around.get(segment, {}).get(key) == own.around[segment][key] != ABSENT
    )
