"""The module's own step, run by several stages, each of which does its part of it for real.

On stage s the step runs as the user wrote it, from its beginning:
1. units of earlier stages give back tensors without content (`Absent`), of shapes known from a trial run;
2. where the step calls the first unit of this stage, those of its arguments that are absent become what the previous
   stage has sent, also for whoever else holds them, such as `x` in ``x = x + block(x)``;
3. the stage's own units, and the code between them, run for real; what else they use of earlier stages has been sent
   as well (see `shapes.py`), and parameters of other stages are lent (see `loans.py`): a trial run has found out which;
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
from .attributes import Readers
from .content import Content, Filled
from .failures import described
from .loans import Borrowed
from .notes import Notes, Written
from .plan import Plan
from .shapes import Shapes, form_text, forms_of, shape_of
from .share import Place, take_apart

__all__ = ["Cut", "Job", "Part"]

_REMEDY = (
    "A pipeline hands over what a unit is called with, and what else the first batch has shown to be used: give the"
    " module a method pipeline_stages() that names its parts in the order of their calls, or choose another strategy,"
    " such as 'fsdp'."
)


class _EndOfStage(BaseException):
    """Leaves the user's step; no `Exception`, so that no handler of theirs takes it for one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


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
        tries_last: whether the trial run goes through the last stage's part too; else what it uses is known.
    """

    step: Callable[[int], Any]
    begin: Callable[[int, int], None]
    resume: Callable[[int, int], None]
    finish: Callable[[int, Any], Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    shapes: Shapes
    micro_batch: str = "a micro-batch"
    tries_last: bool = True


class Cut:
    """A module whose units know which stage is being run.

    Args:
        module: changed in place.
        plan: where it is cut.
        device: of this rank's parameters.
        own_stages: those of this rank.
        lends: whether stages may use parameters that others hold.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        device: torch.device,
        own_stages: Sequence[int],
        *,
        lends: bool = True,
    ) -> None:
        self.module, self.plan, self.device = module, plan, device
        self.job: Job | None = None
        """The job that is being run; None between jobs."""
        self.active: Part | None = None
        """The stage that runs it; None while none does."""
        self.failure: Exception | None = None
        """The exception that the user's step raised, which torch's schedules wrap."""
        self.readers = Readers(
            module,
            plan,
            set(own_stages),
            lambda: None if self.active is None else self.active.stage,
            lambda: self.active is not None and self.active.is_live,
        )
        self.written: dict[int, Written] | None = None
        """Maps each stage to what it writes in a step, while that is noted; else None."""
        self.filled = Filled()
        self.borrowed = Borrowed(module, allowed=lends)
        self.buffer_stages: dict[str, int] = {}
        """The one stage that writes a buffer, by the name of the buffer."""
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

    def owners(self, held: dict[str, int], num_ranks: int) -> dict[str, int]:
        """The rank that has a buffer's values, by its name: of the stage that writes or, if none does, holds it."""
        return held | {name: stage % num_ranks for name, stage in self.buffer_stages.items()}

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
            args, kwargs = self._cut.filled.into(args, kwargs)
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
        self._content = Content(stage, cut.filled, cut.borrowed, cut.device, plan)
        self._calls = self._content.calls
        self._absent = Absent(cut.device, cut.is_buffer, self._content)
        self._tries = False
        """Whether this is a trial run."""
        self._received: tuple[Tensor, ...] | None = None
        self.is_live = False
        """Whether the step has come to this stage's own part."""
        self._index = 0
        self._notes: Notes | None = None

    cut: Cut
    borrowed: nn.ParameterList | None = None
    """The parameters that other stages lend to this one, while a batch is run."""

    def _holds(self, part: nn.Module) -> bool:
        """Whether this stage has a parameter of a module that contains no units."""
        plan = self.cut.plan
        own = list(part.parameters(recurse=False))
        return len(plan.modules[part]) == 1 and any(self.stage in plan.holders[parameter] for parameter in own)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        """Returns what this stage sends to the next one, or the loss.

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
        self._tries = True
        try:
            self(index=torch.zeros(1, dtype=torch.int64))
        except Exception:  # it may be the zeros; what was found out by then counts
            if not (self.is_last and self.is_live):
                raise
            self.cut.failure = None
        finally:
            self._tries = False
            self._content.note_made(is_known=self.is_last and not self.is_live)

    def _run(self, received: tuple[Tensor, ...] | None, index: int) -> Any:
        cut, job = self.cut, self.cut.job
        assert job is not None
        self._index, self._received = index, received
        self.is_live = self._absent.watches = self.stage == 0
        self._absent.meeting, self._absent.met = None, ""
        self._content.begin(job.shapes, tries=self._tries)
        job.begin(index, self.stage)
        # Not in the last stage's trial run, which the zeros may have stopped.
        notes_now = cut.written is not None and self.stage not in cut.written and (received or not self.is_last)
        self._notes = Notes(cut.module, parameters=cut.borrowed.allowed) if notes_now else None
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
        self._content.end()
        if sent is not None:
            return self._to_send(sent)
        if not self.is_last or not self.is_live:
            first = cut.plan.stages[self.stage + self.is_live][0]
            raise CutError(f"the step returned without having called {self._name(first)}. {_REMEDY}")
        if has_absent(output):
            output = apply_to_collection(output, Tensor, self._absent.supplied)
        if has_absent(output):
            raise CutError(self._why_absent(output))
        if self._tries:
            return None
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
        number, calls = self.cut.numbers[unit], self._calls.count
        if self._notes is not None and stage <= self.stage:
            with self._absent.paused():
                self._notes.enter(stage)
        if stage < self.stage and not self.is_live:
            form = job.shapes.units.get(number)
            if form is None:
                return forward(*args, **kwargs)
            output = _without_content(form, self.cut.name_of(unit))
            return self._counted(output, unit, calls)
        if stage == self.stage + 1 and self.is_live:
            raise _EndOfStage(self._offer(list(tensors_in((args, kwargs)))))
        if stage != self.stage:
            raise CutError(f"{users_line()} calls {self._name(unit)} out of order. {_REMEDY}")
        if not self.is_live:
            args, kwargs = self._receive(args, kwargs)
        if has_absent((args, kwargs)):
            with self._absent.paused():
                args, kwargs = apply_to_collection((args, kwargs), Tensor, self._absent.supplied)
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
        return self._counted(output, unit, calls)

    def _counted(self, output: Any, unit: nn.Module, calls: int) -> Any:
        """Notes the result of a unit as that of one call, however many it made."""
        with self._absent.paused():
            self._calls.count = calls
            self._calls.note(repr(self.cut.name_of(unit)), take_apart(output)[1])
        return output

    def _receive(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of this stage's first unit, with content."""
        job, tensors = self.cut.job, list(tensors_in((args, kwargs)))
        assert job is not None
        with self._absent.paused():
            received = self._content.note_needed(tensors) if self._tries else self._received
            if received is None or (self._tries and self.is_last and not job.tries_last):
                raise _EndOfStage(())
            self._content.fill(tensors, received)
        self.is_live = self._absent.watches = True
        self._content.is_own()
        job.resume(self._index, self.stage)
        return self.cut.filled.into(args, kwargs)

    def _offer(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors for the next stage: arguments of its first unit that it lacks, and values that are carried."""
        with self._absent.paused():
            tensors = self._content.offered(tensors)
        shapes = self.cut.job.shapes  # type: ignore[union-attr]
        if self.stage + 1 not in shapes.needed:  # a trial run
            shapes.offered[self.stage] = [None if tensor.is_meta else shape_of(tensor) for tensor in tensors]
            return []
        found = [tensors[index] for index in shapes.needed[self.stage + 1] if index < len(tensors)]
        found += [self._content.of_call(key) for key in shapes.carried[self.stage + 1]]
        agreed = shapes.sent(self.stage)
        if forms_of(found) != forms_of(agreed):  # else they arrive in buffers of other sizes
            next_unit = self._name(self.cut.plan.stages[self.stage + 1][0])
            raise CutError(
                f"{users_line()} gives {next_unit} tensors {form_text(found)}, but gave it {form_text(agreed)} for the"
                " first batch of this batch's shapes, and the next stage expects these again. Give the batch itself the"
                " new size (in the DataLoader, or in on_after_batch_transfer), pad to one size, or choose another"
                " strategy, such as 'fsdp'."
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
        # torch: `zero-bubble` detaches what a stage sends in place, which a view does not allow.
        return tuple(
            (tensor.clone() if tensor._is_view() else tensor).contiguous()
            if tensor.requires_grad or not (trains and tensor.is_floating_point())
            else tensor.detach().contiguous().requires_grad_()
            for tensor in tensors
        )

    def _name(self, unit: nn.Module) -> str:
        return repr(self.cut.name_of(unit))


def _origin(value: Any) -> str:
    """Says in words where the absent tensors in a value come from."""
    names = dict.fromkeys(origin_of(tensor) for tensor in tensors_in(value) if tensor.is_meta)
    said = " and ".join(repr(name) for name in names if name)
    return f" (it comes from {said})" if said else ""


def _without_content(form: Any, origin: str) -> Any:
    def made(place: Place) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype, device="meta")
        mark_origin(tensor, origin)
        return tensor

    return apply_to_collection(form, Place, made)
