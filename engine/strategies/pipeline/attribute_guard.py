"""Raises an error where code reads an attribute on a pipeline stage that does not have its value.

A stage skips the units of other stages. Attributes that these write (an auxiliary loss, a router's logits, a running
statistic) are missing on this stage, or are those of an earlier batch; and attributes that the step writes after the
units exist on the last stage only. `WriteRecorder` records the writes: in a trial run on all stages but the last, and
in the first micro-batch on the last one. From then on `AttributeGuard` raises an error where user code reads such an
attribute on another stage. If two stages write the same state (the statistics of a BatchNorm that is called before and
after the units), neither stage has the right value, and the run ends before its first optimizer step.

A step has one segment for each stage: from the stage's first unit to that of the next stage. Stage s runs the segments
up to its own: those of earlier stages without content, and its own with real values. So a stage has the right value of
an attribute if it runs all segments in which the attribute is written, and writes in each of them the same as the
segment's own stage.
"""

import collections
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .attribute_writes import NO_CONTENT, REMEDY, Key, StageWrites
from .plan import StagePlan
from .remote_values import CutError, is_users, users_line

__all__ = ["AttributeGuard"]

_SEPARATE = (
    "Have each place use a module of its own; or give the module a method pipeline_stages() that puts all that use this"
    " one into one stage; or choose another strategy, such as 'fsdp'."
)
_RETURN = (
    "Log it with `self.log`, or return it from the step and take it from the `outputs` of the hook at the batch's end:"
    " these are the same on all stages."
)


class AttributeGuard:
    """Raises an error where user code reads an attribute that only another stage has written.

    Args:
        module: the classes of its sub-modules are replaced by guarded ones, until `close`.
        plan: says which stages hold a parameter.
        own_stages: the stages of this rank.
        present_stage: returns the stage that runs, or None outside of a step.
        is_live: returns whether the step has come to that stage's own part.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        own_stages: set[int],
        present_stage: Callable[[], int | None],
        is_live: Callable[[], bool],
    ) -> None:
        self._module, self._plan = module, plan
        self._own_stages, self._present_stage, self._is_live = own_stages, present_stage, is_live
        self.inside = False
        """Whether a unit of the stage runs: a unit may read attributes that it writes itself."""
        self.saves = False
        """Whether a state dict is made, in which each stage's values count for its own modules."""
        self._stages_with_value: dict[Key, set[int]] = {}
        self._writers: dict[Key, str] = {}
        """The code that writes an attribute, in words."""
        self._original_classes: dict[nn.Module, type] = {}
        self._written_in_step: dict[str, dict[int, StageWrites]] = collections.defaultdict(dict)
        self._consistent_stages: dict[Key, set[int]] = {}
        """The stages that have the right value after every step, by attribute."""
        self._writers_by_stage: dict[Key, dict[int, str]] = {}
        """The stages that write an attribute, each with what writes it, in words."""

    def learn(self, step: str, stage: int, written: StageWrites, num_stages: int) -> None:
        """Takes the writes of a stage; called on all ranks, for the last stage last.

        Args:
            step: name of the step.
            stage: the stage that wrote.
            written: the attributes that it wrote.
            num_stages: number of stages of the pipeline.

        Raises:
            CutError: several stages write the same state, so no stage has the value of one process.
        """
        for (part, attribute), values in written.chosen.items():
            vars(self._module.get_submodule(part).__dict__[attribute]).update(values)
        for key, unit in written.by_units.items():
            stages = self._stages_with_value.setdefault(key, {stage})
            if stage not in stages:
                stages.clear()  # units of two stages write it: no stage has all writes
            self._writers.setdefault(key, f"the block {unit!r}")
        by_stage = self._written_in_step[step]
        by_stage[stage] = written
        if stage == num_stages - 1:
            around = [key for writes in by_stage.values() for marks in writes.around.values() for key in marks]
            for key in dict.fromkeys([*around, *(key for writes in by_stage.values() for key in writes.by_units)]):
                self._update_stages(step, key, by_stage)
        self._install()

    def _update_stages(self, step: str, key: Key, by_stage: dict[int, StageWrites]) -> None:
        """Finds the stages that have the right value of an attribute, when the writes of all stages are known."""
        segments = [
            stage for stage, writes in by_stage.items() if key in writes.by_units or key in writes.around.get(stage, {})
        ]
        if not segments:
            return
        stages = {stage for stage in by_stage if all(_agrees(by_stage, key, segment, stage) for segment in segments)}
        stages &= self._consistent_stages.get(key, stages)  # the stages that were right after the other steps
        self._consistent_stages[key] = stages
        writers = self._writers_by_stage.setdefault(key, {})
        for stage in segments:
            unit = by_stage[stage].by_units.get(key)
            writers.setdefault(stage, f"`{step}`" if unit is None else f"the block {unit!r}")
        parameter = self._module.get_submodule(key[0])._parameters.get(key[1])
        needed = {*writers, *(() if parameter is None else self._plan.holders.get(parameter, ()))}
        if not needed <= stages and any(key in writes.states for writes in by_stage.values()):
            raise CutError(self._conflict_text(key, writers))
        if len(stages) < len(by_stage):
            self._stages_with_value[key] = stages
            self._writers.setdefault(key, writers[segments[0]])

    def _conflict_text(self, key: Key, writers: dict[int, str]) -> str:
        part, name = self._module.get_submodule(key[0]), ".".join(filter(None, key))
        kind = "buffer" if key[1] in part._buffers else "parameter" if key[1] in part._parameters else "attribute"
        writers_text = " and ".join(f"{code} on pipeline stage {stage}" for stage, code in sorted(writers.items()))
        return (
            f"the {kind} {name!r} of {type(part).__name__} is written by {writers_text}, and each stage has a copy of"
            f" its own, so that none has the value that one process has. {_SEPARATE}"
        )

    @property
    def written(self) -> set[Key]:
        """The attributes that any stage is known to write, including those that all stages write alike."""
        states = (writes.states for by_stage in self._written_in_step.values() for writes in by_stage.values())
        return set(self._writers).union(*states)

    def buffer_stages(self) -> dict[str, int]:
        """Maps the name of each buffer that a step writes to a stage that has its value."""
        parts = dict(self._module.named_modules())
        return {
            f"{name}.{attribute}" if name else attribute: min(stages)
            for (name, attribute), stages in self._stages_with_value.items()
            if attribute in parts[name]._buffers and stages
        }

    def _install(self) -> None:
        parts = dict(self._module.named_modules())
        for name, _ in self._stages_with_value:
            part = parts[name]
            if part not in self._original_classes:
                self._original_classes[part] = type(part)
                part.__class__ = _guarded_class(type(part), functools.partial(self._check, name))

    def _check(self, part: str, attribute: str) -> None:
        stages = self._stages_with_value.get((part, attribute))
        if stages is None or self.saves:
            return
        stage = self._present_stage()
        # Frame 1 is `__getattribute__`, frame 2 the code that reads. A module of torch may read its own attributes.
        if not (by_user := is_users(sys._getframe(2))):
            if stage is None or not self._is_live() or attribute not in self._module.get_submodule(part)._buffers:
                return
        elif self.inside:
            return
        if (self._own_stages if stage is None else {stage}) & stages:
            return
        owner = repr(part) if part else type(self._module).__name__
        writer = self._writers[part, attribute]
        remedy = _SEPARATE if not by_user else REMEDY if writer.startswith("the block") else _RETURN
        raise CutError(
            f"{users_line()} reads {attribute!r} of {owner}, which {writer} writes on another pipeline stage. {remedy}"
        )

    def close(self) -> None:
        """Gives the modules their own classes again."""
        for part, kind in self._original_classes.items():
            part.__class__ = kind
        for table in (
            self._original_classes,
            self._stages_with_value,
            self._writers,
            self._written_in_step,
            self._consistent_stages,
            self._writers_by_stage,
        ):
            table.clear()


def _guarded_class(kind: Any, check: Callable[[str], None]) -> type:
    def read(self: Any, name: str) -> Any:
        check(name)
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(names))


def _agrees(by_stage: dict[int, StageWrites], key: Key, segment: int, stage: int) -> bool:
    """Whether `stage` has made the same writes in `segment` as the segment's own stage."""
    own = by_stage[segment]
    if segment >= stage:
        return segment == stage and own.around.get(segment, {}).get(key) != NO_CONTENT
    return (
        key not in own.by_units
        and by_stage[stage].around.get(segment, {}).get(key) == own.around[segment][key] != NO_CONTENT
    )
