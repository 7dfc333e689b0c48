"""The module's own step, run by several stages, each of which does its part of it for real.

On stage s the step runs as the user wrote it, from its beginning:
1. units of earlier stages give back tensors without content (`Absent`), of shapes known from a trial run;
2. where the step calls the first unit of this stage, those of its arguments that are absent become what the previous
   stage has sent, also for whoever else holds them, such as `x` in ``x = x + block(x)``;
3. the stage's own units, and the code between them, run for real;
4. where the step calls a unit of the next stage, `_EndOfStage` leaves it, and the arguments that are absent there are
   sent. The last stage has no such end: it runs the rest of the step, and has the loss.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .absent import Absent, CutError, has_absent, mark_origin, origin_of, tensors_in, users_line
from .attributes import Notes, Readers, Written
from .failures import described
from .plan import Plan
from .share import Place, take_apart

__all__ = ["Cut", "Job", "Part", "Shapes"]

_REMEDY = (
    "A pipeline hands over what a unit is called with, and nothing else: give the module a method pipeline_stages()"
    " that names its parts in the order of their calls, or choose another strategy, such as 'fsdp'."
)


class _EndOfStage(BaseException):
    """Leaves the user's step; no `Exception`, so that no handler of theirs takes it for one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


@dataclasses.dataclass
class Shapes:
    """What is known of one kind of micro-batch, on all stages."""

    units: dict[int, Any] = dataclasses.field(default_factory=dict)
    """What a unit returns, by its number, with places for tensors."""
    offered: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)
    """The tensors that a stage could send to the next one, as shapes on the meta device."""
    needed: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Which of them the next stage, under whose number they are, does not have itself."""

    def sent(self, stage: int) -> tuple[Tensor, ...]:
        """Shapes of what a stage sends."""
        return tuple(self.offered[stage][index] for index in self.needed[stage + 1])


@dataclasses.dataclass
class Job:
    """A step of the module that is to be run for each micro-batch.

    Attributes:
        step: runs micro-batch i.
        begin: called before it, with i and the stage.
        resume: called with i and the stage where the stage's own part begins.
        finish: turns what the step returned for micro-batch i into what the schedule takes for a loss.
        context: entered around each.
        shapes: of this kind of micro-batch; a trial run fills them in.
        micro_batch: one of them in words, for errors.
    """

    step: Callable[[int], Any]
    begin: Callable[[int, int], None]
    resume: Callable[[int, int], None]
    finish: Callable[[int, Any], Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    shapes: Shapes
    micro_batch: str = "a micro-batch"


class Cut:
    """A module whose units know which stage is being run.

    Args:
        module: changed in place.
        plan: where it is cut.
        device: of this rank's parameters.
        own_stages: those of this rank.
    """

    def __init__(self, module: nn.Module, plan: Plan, device: torch.device, own_stages: Sequence[int]) -> None:
        self.module, self.plan, self.device = module, plan, device
        self.job: Job | None = None
        """What is being run."""
        self.active: Part | None = None
        """By which stage."""
        self.failure: Exception | None = None
        """What the user's step raised, which torch's schedules wrap."""
        self.readers = Readers(module, set(own_stages), lambda: None if self.active is None else self.active.stage)
        self.written: dict[int, Written] | None = None
        """By stage, what it writes in a step, while that is noted; else None."""
        self.filled: dict[int, tuple[Tensor, Tensor]] = {}
        """By id, absent tensors that could not be filled in place, and what took theirs, until backward is over."""
        self.numbers = {unit: number for number, unit in enumerate(unit for stage in plan.stages for unit in stage)}
        for stage, units in enumerate(plan.stages):
            for unit in units:
                unit.forward = _Forward(self, unit, stage, unit.forward)

    def name_of(self, unit: nn.Module) -> str:
        """The first name of a sub-module."""
        return next(name for name, part in self.module.named_modules() if part is unit)

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a buffer of the module."""
        return any(tensor is buffer for buffer in self.module.buffers())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around the forward of a unit that this rank has."""
        before, self.readers.inside = self.readers.inside, True
        try:
            yield
        finally:
            self.readers.inside = before


class _Forward:
    """In the place of a unit's forward."""

    def __init__(self, cut: Cut, unit: nn.Module, stage: int, forward: Callable[..., Any]) -> None:
        self._cut, self._unit, self._stage, self._forward = cut, unit, stage, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._cut.active
        if part is None:  # called by a hook of the user's, or again in backward
            args, kwargs = _with_content(args, kwargs, self._cut.filled)
            with self._cut.inside():
                return self._forward(*args, **kwargs)
        return part.call(self._unit, self._stage, self._forward, args, kwargs)


class Part(nn.Module):
    """One stage of a module, as torch's `PipelineStage` runs it.

    Its sub-modules are those whose parameters this stage holds.

    Args:
        cut: the module.
        stage: number of the stage.
    """

    def __init__(self, cut: Cut, stage: int) -> None:
        super().__init__()
        self.__dict__["cut"] = cut  # not one of its sub-modules
        self.stage = stage
        plan = cut.plan
        units = {part for unit in plan.stages[stage] for part in unit.modules()}
        own = [part for part in plan.modules if part in units or self._holds(part)]
        inside = {child for part in own for child in part.children()}
        self.own = nn.ModuleList([part for part in own if part not in inside])
        around = [part for part, places in plan.modules.items() if len(places) > 1 and stage in places]
        # Of modules that contain units.
        self.around = nn.ParameterList(dict.fromkeys(p for part in around for p in part.parameters(recurse=False)))
        self.is_last = stage == plan.num_stages - 1
        self._absent = Absent(cut.device, cut.is_buffer)
        self._received: tuple[Tensor, ...] | None = None
        self._is_live = False
        """Whether the step has come to this stage's own part."""
        self._index = 0
        self._notes: Notes | None = None

    cut: Cut

    def _holds(self, part: nn.Module) -> bool:
        """Whether this stage has a parameter of a module that contains no units."""
        plan = self.cut.plan
        own = list(part.parameters(recurse=False))
        return len(plan.modules[part]) == 1 and any(self.stage in plan.holders[parameter] for parameter in own)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        """What this stage sends to the next one, or the loss.

        Args:
            received: from the previous stage; none in a trial run.
            index: number of the micro-batch, [1], on the host.
        """
        try:
            return self._run(received or None, int(index))
        except Exception as error:
            self.cut.failure = error
            if hasattr(error, "add_note") and not isinstance(error, CutError):  # from Python 3.11 on
                error.add_note(described(error, self.stage, self.cut.job.micro_batch))  # type: ignore[union-attr]
            raise

    def try_out(self) -> None:
        """Runs micro-batch 0, of which the previous stage has sent zeros, as far as it takes to know the shapes."""
        self(index=torch.zeros(1, dtype=torch.int64))

    def _run(self, received: tuple[Tensor, ...] | None, index: int) -> Any:
        cut, job = self.cut, self.cut.job
        assert job is not None
        self._index, self._received = index, received
        self._is_live = self._absent.watches = self.stage == 0
        self._absent.meeting, self._absent.met = None, ""
        job.begin(index, self.stage)
        # The last stage's trial run ends before its units.
        notes_now = cut.written is not None and self.stage not in cut.written and (received or not self.is_last)
        self._notes = Notes(cut.module) if notes_now else None
        cut.active = self
        sent: Sequence[Tensor] | None = None
        output: Any = None
        try:
            with job.context(), self._absent:
                output = job.step(index)
        except _EndOfStage as end:
            sent = end.tensors
            end.__traceback__ = None  # which holds all that the step had computed
        finally:
            cut.active = self._received = None
        if self._notes is not None:
            cut.written[self.stage] = self._notes.end()  # type: ignore[index]
        if sent is not None:
            return self._to_send(sent)
        if not self.is_last or not self._is_live:
            first = cut.plan.stages[self.stage + self._is_live][0]
            raise CutError(f"the step returned without having called {self._name(first)}. {_REMEDY}")
        if has_absent(output):
            raise CutError(self._why_absent(output))
        return job.finish(index, output)

    def _why_absent(self, output: Any) -> str:
        """Why the step returns what this stage does not have."""
        line, met = self._absent.meeting or "the step", self._absent.met
        if met:
            return (
                f"{line} uses {met!r} behind the blocks, but what is registered before them belongs to the first"
                " pipeline stage: assign its module to an attribute behind them in the constructor (if it is used"
                " before them too: another module that shares the parameter), give the module a method"
                " pipeline_stages(), or choose another strategy, such as 'fsdp'."
            )
        origin = _origin(output)
        return (
            f"{line} needs what an earlier pipeline stage has{origin}, together with what the last one has, for what"
            f" the step returns. {_REMEDY}"
        )

    def call(self, unit: nn.Module, stage: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit of stage `stage`, called by the step."""
        job = self.cut.job
        assert job is not None
        number = self.cut.numbers[unit]
        if stage < self.stage and not self._is_live:
            form = job.shapes.units.get(number)
            return forward(*args, **kwargs) if form is None else _without_content(form, self.cut.name_of(unit))
        if stage == self.stage + 1 and self._is_live:
            raise _EndOfStage(self._offer(list(tensors_in((args, kwargs)))))
        if stage != self.stage:
            raise CutError(f"{users_line()} calls {self._name(unit)} out of order. {_REMEDY}")
        if not self._is_live:
            args, kwargs = self._receive(args, kwargs)
        if has_absent((args, kwargs)):
            raise CutError(
                f"{users_line()} gives {self._name(unit)} a value that only an earlier pipeline stage"
                f" has{_origin((args, kwargs))}. {_REMEDY}"
            )
        notes = self._notes and self._notes.unit(self.cut.name_of(unit), unit, (args, kwargs))
        with self._absent.paused(), self.cut.inside(), notes or nullcontext():
            output = forward(*args, **kwargs)
        if number not in job.shapes.units:
            job.shapes.units[number] = take_apart(output)[0]
        return output

    def _receive(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of this stage's first unit, with content."""
        job, shapes, tensors = self.cut.job, self.cut.job.shapes, list(tensors_in((args, kwargs)))  # type: ignore[union-attr]
        assert job is not None
        received = self._received
        if received is None:  # a trial run
            shapes.needed[self.stage] = [index for index, tensor in enumerate(tensors) if tensor.is_meta]
            if self.is_last:
                raise _EndOfStage(())
            received = tuple(_zeros(shape, self.cut.device) for shape in shapes.sent(self.stage - 1))
        with self._absent.paused():
            for index, content in zip(shapes.needed[self.stage], received, strict=True):
                if tensors[index].is_meta and not _fill(tensors[index], alias := content.view_as(content)):
                    self.cut.filled[id(tensors[index])] = tensors[index], alias
        self._is_live = self._absent.watches = True
        job.resume(self._index, self.stage)
        return _with_content(args, kwargs, self.cut.filled)

    def _offer(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the next stage does not have of the arguments of its first unit."""
        shapes = self.cut.job.shapes  # type: ignore[union-attr]
        if self.stage + 1 not in shapes.needed:  # a trial run
            shapes.offered[self.stage] = [_shape_of(tensor) for tensor in tensors]
            return []
        found = [tensors[index] for index in shapes.needed[self.stage + 1] if index < len(tensors)]
        agreed = shapes.sent(self.stage)
        if _forms(found) != _forms(agreed):  # else they arrive in buffers of other sizes
            raise CutError(
                f"{users_line()} gives {self._name(self.cut.plan.stages[self.stage + 1][0])} tensors {_said(found)},"
                f" but gave it {_said(agreed)} for the first batch of this batch's shapes, and the next stage expects"
                " these again. Give the batch itself the new size (in the DataLoader, or in on_after_batch_transfer),"
                " pad to one size, or choose another strategy, such as 'fsdp'."
            )
        return found

    def _to_send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Without gaps, and with a gradient where there could be one: then the stages before need not know."""
        trains = torch.is_grad_enabled() and bool(tensors)
        has_gradients = not trains or any(tensor.requires_grad for tensor in tensors)
        if not has_gradients and (self.stage or any(parameter.requires_grad for parameter in self.parameters())):
            next_unit = self._name(self.cut.plan.stages[self.stage + 1][0])
            raise CutError(
                f"the arguments of {next_unit} have no gradient, though there is something to train before it: call"
                " units with gradients; around them, torch.utils.checkpoint needs use_reentrant=False."
            )
        return tuple(
            tensor.contiguous()
            if tensor.requires_grad or not (trains and tensor.is_floating_point())
            else tensor.detach().contiguous().requires_grad_()
            for tensor in tensors
        )

    def _name(self, unit: nn.Module) -> str:
        return repr(self.cut.name_of(unit))


def _fill(absent: Tensor, content: Tensor) -> bool:
    """Gives an absent tensor its content, for all who hold it, if that can be done."""
    if isinstance(absent, nn.Parameter):
        return False
    try:
        torch.utils.swap_tensors(absent, content)
    except RuntimeError:  # something else than Python holds it: a view of it, or torch.utils.checkpoint
        return False
    return True


def _with_content(args: Any, kwargs: Any, filled: dict[int, tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    if not filled:
        return args, kwargs
    return apply_to_collection((args, kwargs), Tensor, lambda tensor: filled.get(id(tensor), (None, tensor))[1])


def _shape_of(tensor: Tensor) -> Tensor:
    """With a gradient where `Part._to_send` gives it one."""
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return shape.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


def _forms(tensors: Sequence[Tensor]) -> list[tuple[list[int], torch.dtype]]:
    return [(list(tensor.shape), tensor.dtype) for tensor in tensors]


def _said(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in _forms(tensors)) or "none"


def _zeros(shape: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(shape.shape, dtype=shape.dtype, device=device).requires_grad_(shape.requires_grad)


def _origin(value: Any) -> str:
    """Where the absent tensors in a value come from, in words."""
    names = dict.fromkeys(origin_of(tensor) for tensor in tensors_in(value) if tensor.is_meta)
    said = " and ".join(repr(name) for name in names if name)
    return f" (it comes from {said})" if said else ""


def _without_content(form: Any, origin: str) -> Any:
    def made(place: Place) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype, device="meta")
        mark_origin(tensor, origin)
        return tensor

    return apply_to_collection(form, Place, made)
