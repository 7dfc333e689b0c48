"""Attributes that a step writes on a pipeline stage: they are recorded, and guarded on stages that lack their values.

A step has one segment for each stage: from the stage's first unit to that of the next stage. Stage s runs the segments
up to its own: those of earlier stages without content, and its own with real values.
"""

import collections
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ..._compat.torch import tree_leaves
from ..callers import CutError, is_users, users_line
from ..contents import num_writes
from .plan import StagePlan
from .reachable_state import NOT_THE_USERS_ATTRIBUTES, Code, Place, Walk, is_of_a_users_class
from .remote_values import has_absent

__all__ = ["NO_CONTENT", "REMEDY", "AttributeGuard", "Key", "StageWrites", "WriteRecorder"]

REMEDY = (
    "Have the block return the value and hand it on through the arguments of the blocks that follow, as in `x, aux ="
    " block(x, aux)`, or choose another strategy, such as 'fsdp'."
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.deque, collections.OrderedDict, collections.defaultdict)
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
    chosen: dict[Key, dict[str, str]]
    """The words that other code has chosen in an object where there was None, as transformers' classifiers choose their
    configuration's `problem_type` by the first labels: for all stages, which read the same object for other things."""


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
        self._chosen: dict[Key, dict[str, str]] = {}
        self._segment = 0
        self._of_units: dict[Key, str] = {}
        """The attributes that units have written in this segment, with the unit's name."""
        self._names = {id(part): name for name, part in module.named_modules()}
        self._before = self._fingerprints(module)

    def _fingerprints(self, part: nn.Module) -> dict[Key, Any]:
        """Returns the fingerprints of the attributes of the module, or of a unit: not more than it costs to run it."""
        return _fingerprints(part, self._names, parameters=self._parameters)

    def enter(self, segment: int) -> None:
        """Called where the step comes to the first unit of a stage: the segment of that stage begins."""
        if segment > self._segment:
            self._close()
            self._segment = segment

    def _close(self) -> None:
        after = self._fingerprints(self._module)
        changed = _changed(self._before, after)
        for key in changed - self._of_units.keys():
            if names := _names_of_chosen(self._before.get(key), after[key]):
                values = vars(_value(self._module, key))
                self._chosen[key] = {name: values[name] for name in names}
        changed -= self._chosen.keys()
        # A list of a unit may be an attribute of the module, too.
        aliases = {id(_value(self._module, key)): name for key, name in self._of_units.items()}
        for key in changed - self._of_units.keys():
            value = _value(self._module, key)
            if not isinstance(value, _PLAIN) and id(value) in aliases:
                self._of_units[key] = aliases[id(value)]
        self._by_units.update(self._of_units)
        self._states |= {key for key in changed if self._is_state(key, self._before.get(key), after[key])}
        self._around[self._segment] = {
            key: NO_CONTENT if has_absent(_value(self._module, key)) else _num_writes(self._before.get(key), after[key])
            for key in after
            if key in changed - self._of_units.keys()
        }
        self._before, self._of_units = after, {}

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
        hooks = list(_hooks_inside(name, unit))
        before = self._fingerprints(unit), _fingerprint(arguments), [_hook_marks(unit, tables) for _, tables in hooks]
        yield
        changed = _changed(before[0], self._fingerprints(unit))
        self._of_units.update(dict.fromkeys(changed, name))
        if _fingerprint(arguments) != before[1]:
            raise CutError(
                f"{name!r} writes into a list or dict that it is called with, but the pipeline stages that skip it"
                f" have one of their own. {REMEDY}"
            )
        for (where, tables), marks in zip(hooks, before[2], strict=True):
            if _hook_marks(unit, tables) != marks:
                raise CutError(
                    f"{where}, which lies inside of a block, keeps what it is called with, but the pipeline stages that"
                    f" skip the block do not call it. {REMEDY}"
                )

    def end(self) -> StageWrites:
        """Ends the last segment; returns the record."""
        self._close()
        return StageWrites(self._by_units, self._around, self._states, self._chosen)


def _fingerprints(part: nn.Module, names: dict[int, str], *, parameters: bool) -> dict[Key, Any]:
    """Returns a fingerprint of each attribute of a module and what is in it: it differs if the attribute was written.

    Args:
        part: the module.
        names: the names of it and its sub-modules, by their ids.
        parameters: whether parameters are included.
    """
    fingerprints: dict[Key, Any] = {}
    for submodule in part.modules():
        if isinstance(submodule, Metric) or id(submodule) not in names:  # see `log.py`
            continue
        name = names[id(submodule)]
        for attribute, value in submodule.__dict__.items():
            if attribute not in NOT_THE_USERS_ATTRIBUTES:
                fingerprints[name, attribute] = _fingerprint(value)
        for key, buffer in submodule._buffers.items():
            if buffer is not None:  # by value too: BatchNorm and writes to `.data` do not change a tensor's version
                fingerprints[name, key] = (*_fingerprint(buffer), _sums(buffer))
        if parameters:  # by version only: parameters that are lent replace shapes
            for key, parameter in submodule._parameters.items():
                if parameter is not None:
                    fingerprints[name, key] = (nn.Parameter, 0 if parameter.is_meta else num_writes(parameter))
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
    if isinstance(value, contextvars.ContextVar):
        return same, _fingerprint(value.get(None), depth + 1)
    if type(value) in _CONTAINERS:
        items: Iterable[Any] = (*value, *value.values()) if isinstance(value, dict) else value
        # Tuples, such as shapes, are equal if their values are; other containers only if they are the same object.
        return (None if isinstance(value, tuple) else same), [_fingerprint(item, depth + 1) for item in items]
    if is_of_a_users_class(value) and hasattr(value, "__dict__"):
        return same, {name: _fingerprint(of, depth + 1) for name, of in vars(value).items()}
    return same


def _differ(one: Any, other: Any) -> bool:
    """Whether values differ, as far as tensors and plain values in them tell."""
    if one is other:
        return False
    pairs = list(zip(ones := tree_leaves(one), others := tree_leaves(other), strict=False))
    return len(ones) != len(others) or any(_leaves_differ(*pair) for pair in pairs)


def _leaves_differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_meta or other.is_meta or has_absent((one, other)):
            return False
        return one.shape != other.shape or not torch.equal(one, other)
    return isinstance(one, _PLAIN) and repr(one) != repr(other)


def _names_of_chosen(before: Any, after: Any) -> list[str]:
    """Returns the attributes of an object that were None and are strings now, if nothing else of it has changed."""
    if not (_is_of_object(before) and _is_of_object(after)) or before[0] != after[0]:
        return []
    names = [name for name in {**before[1], **after[1]} if before[1].get(name) != after[1].get(name)]
    return names if all(before[1].get(name) == "None" and _is_word(after[1].get(name)) for name in names) else []


def _is_of_object(fingerprint: Any) -> bool:
    return isinstance(fingerprint, tuple) and isinstance(fingerprint[-1], dict)


def _is_word(fingerprint: Any) -> bool:
    """Whether a fingerprint is that of a string."""
    return isinstance(fingerprint, str) and fingerprint[:1] in "'\""


def _hooks_inside(name: str, unit: nn.Module) -> Iterator[tuple[str, dict[Place, Any]]]:
    """Yields the forward hooks and replaced forwards inside a unit, in words, and the tables of what they use."""
    for inner, submodule in unit.named_modules(prefix=name):
        if submodule is unit:  # the hooks of the unit itself run on all stages
            continue
        patched = [submodule.__dict__["forward"]] if "forward" in submodule.__dict__ else []
        for hook in (*submodule._forward_hooks.values(), *submodule._forward_pre_hooks.values(), *patched):
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                code = Code()
                code.follow_hook(hook, inner)
                hook_name = getattr(hook, "__qualname__", type(hook).__name__)
                yield f"the forward hook {hook_name!r} on {inner!r}", code.tables


def _hook_marks(unit: nn.Module, tables: dict[Place, Any]) -> Any:
    """Returns a mark of the containers and objects of users' classes that a hook uses."""
    values = {place: table for place, table in tables.items() if _keeps(table.get(place.name))}
    return Walk({id(part) for part in unit.modules()}).marks_in(values)


def _keeps(value: Any) -> bool:
    """Whether a value may keep what a hook is called with."""
    return isinstance(value, (*_CONTAINERS, contextvars.ContextVar)) or is_of_a_users_class(value)


# --- the guard of attributes
# A stage skips the units of other stages. Attributes that these write (an auxiliary loss, a router's logits, a
# running statistic) are missing on this stage, or are those of an earlier batch; and attributes that the step writes
# after the units exist on the last stage only. `WriteRecorder` records the writes: in a trial run on all stages but
# the last, and in the first micro-batch on the last one. From then on `AttributeGuard` raises an error where user
# code reads such an attribute on another stage. If two stages write the same state (the statistics of a BatchNorm
# that is called before and after the units), neither stage has the right value, and the run ends before its first
# optimizer step.
#
# A step has one segment for each stage: from the stage's first unit to that of the next stage. Stage s runs the
# segments up to its own: those of earlier stages without content, and its own with real values. So a stage has the
# right value of an attribute if it runs all segments in which the attribute is written, and writes in each of them
# the same as the segment's own stage.


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
        self._of_micro_batches: dict[Key, str] = {}
        """The steps that write attributes anew in each micro-batch, with other values."""
        self._left: dict[Key, Any] = {}
        """The values of these that the last step has left."""

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

    def compare(self, step: str, left: Sequence[Mapping[Key, Any]]) -> None:
        """Finds the attributes that a step writes anew in each micro-batch with other values: hooks see the last one's.

        Args:
            step: name of the step, whose writes are known.
            left: the attributes as each micro-batch has left them.
        """
        keys = set[Key]()
        for writes in self._written_in_step[step].values():
            marks = (marks for around in writes.around.values() for marks in around.items())
            keys |= writes.by_units.keys() | {key for key, mark in marks if mark == _REPLACED}
        for key in keys:
            first, *others = [values[key] for values in left if key in values] or [None]
            if any(_differ(first, other) for other in others):
                self._of_micro_batches[key] = step
        self._install()

    def end_batch(self) -> None:
        """Called after the micro-batches of each batch: the values that they have left are no batch's."""
        self._left = {
            (part, name): vars(self._module.get_submodule(part)).get(name) for part, name in self._of_micro_batches
        }

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
            raise CutError(self.conflict_text(key, writers))
        if len(stages) < len(by_stage):
            self._stages_with_value[key] = stages
            self._writers.setdefault(key, writers[segments[0]])

    def conflict_text(self, key: Key, writers: Mapping[int, str]) -> str:
        """Returns the message for state that several stages write, each with what writes it, in words."""
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
        for name, _ in (*self._stages_with_value, *self._of_micro_batches):
            part = parts[name]
            if part not in self._original_classes:
                self._original_classes[part] = type(part)
                part.__class__ = _guarded_class(type(part), functools.partial(self._check, name))

    def _check(self, part: str, attribute: str) -> None:
        if (part, attribute) in self._left and not self.saves and self._present_stage() is None:
            self._check_left(part, attribute)
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

    def _check_left(self, part: str, attribute: str) -> None:
        # Frame 1 is `_check`. What a hook has written since is its own.
        value = vars(self._module.get_submodule(part)).get(attribute)
        if value is self._left[part, attribute] and is_users(sys._getframe(3)):
            owner = repr(part) if part else type(self._module).__name__
            raise CutError(
                f"{users_line()} reads {attribute!r} of {owner}, which `{self._of_micro_batches[part, attribute]}`"
                f" writes in each micro-batch of a pipeline: this is the value of the last one, not of the batch."
                f" {_RETURN} Or choose the options microbatches=1,schedule=gpipe."
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
            self._of_micro_batches,
            self._left,
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
