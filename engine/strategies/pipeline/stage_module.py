"""Runs the module's own step on several stages, each of which computes its part with real values.

On stage s the step runs as the user wrote it, from its beginning:
1. units of earlier stages return tensors without content (`RemoteValueMode`), of shapes known from a trial run;
2. where the step calls the first unit of this stage, the absent arguments are filled with what the previous stage has
   sent, and so are other references to them, such as `x` in ``x = x + block(x)``;
3. the stage's own units, and the code between them, run with real values. Other values of earlier stages that they use
   have been sent as well (see `shapes.py`), and parameters of other stages are lent (see `received_values.py`): a trial
   run has found which;
4. where the step calls a unit of the next stage, `_EndOfStage` leaves the step, and the arguments that the next stage
   lacks are sent. The last stage runs the rest of the step, and has the loss.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ...data.samples import tensors_in
from ..callers import CutError, is_of_program, users_line
from ..contents import Contents
from .attribute_writes import WriteRecorder
from .parameter_writes import no_new_parameters
from .partitioned_module import PartitionedModule
from .received_values import ReceivedValues
from .remote_values import RemoteValueMode, has_absent, mark_origin, origin_of
from .shapes import TensorSlot, flatten_tree, form_text, shape_of, shapes_and_dtypes

__all__ = ["StageModule", "describe_failure"]

_REMEDY = (
    "A pipeline hands over what a unit is called with, and what else the first batch has shown to be used: give the"
    " module a method pipeline_stages() that names its parts in the order of their calls, or choose another strategy,"
    " such as 'fsdp'."
)


class _EndOfStage(BaseException):
    """Leaves the user's step; not an `Exception`, so that the user's handlers do not catch it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


class StageModule(nn.Module):
    """One stage of a module, as torch's `PipelineStage` runs it.

    Its sub-modules are those whose parameters this stage holds.

    Args:
        partitioned: the whole module, partitioned.
        stage: number of the stage.
    """

    def __init__(self, partitioned: PartitionedModule, stage: int) -> None:
        super().__init__()
        self.__dict__["partitioned"] = partitioned  # not one of its sub-modules
        self.stage = stage
        plan = partitioned.plan
        units = {submodule for unit in plan.stages[stage] for submodule in unit.modules()}
        own = [submodule for submodule in plan.modules if submodule in units or self._holds(submodule)]
        inside = {child for submodule in own for child in submodule.children()}
        self.own = nn.ModuleList([submodule for submodule in own if submodule not in inside])
        around = [submodule for submodule in plan.around if stage in plan.modules[submodule]]
        # The own parameters of modules that contain units.
        self.around = nn.ParameterList(
            dict.fromkeys(p for submodule in around for p in submodule.parameters(recurse=False))
        )
        self.is_last = stage == plan.num_stages - 1
        self._content = ReceivedValues(stage, partitioned.filled, partitioned.borrowed, partitioned.device, plan)
        self._calls = self._content.calls
        self._absent = RemoteValueMode(partitioned.device, partitioned.is_buffer, self._content)
        self._is_trial = False
        """Whether this is a trial run."""
        self._received: tuple[Tensor, ...] | None = None
        self.is_live = False
        """Whether the step has come to this stage's own part."""
        self.micro_batch = 0
        """The number of the micro-batch that `forward` runs. It is not an argument, since FSDP2 would move it to the
        device, and reading it there would wait for all earlier work."""
        self._index = 0
        self._needs_gradients = False
        """Whether gradients are to come back through what this stage sends."""
        self._recorder: WriteRecorder | None = None

    partitioned: PartitionedModule
    borrowed: nn.ParameterList | None = None
    """The parameters that other stages lend to this one, while a batch is run."""

    def _holds(self, submodule: nn.Module) -> bool:
        """Whether this stage has a parameter of a module that contains no units."""
        plan = self.partitioned.plan
        own = list(submodule.parameters(recurse=False))
        return len(plan.modules[submodule]) == 1 and any(self.stage in plan.holders[parameter] for parameter in own)

    def forward(self, *received: Tensor) -> Any:
        """Runs this stage's part of the step for `micro_batch`; returns the tensors for the next stage, or the loss.

        Args:
            received: tensors from the previous stage; none in a trial run.
        """
        try:
            return self._run(received or None, self.micro_batch)
        except Exception as error:
            self.partitioned.failure = error
            if hasattr(error, "add_note") and not isinstance(error, CutError):  # from Python 3.11 on
                error.add_note(describe_failure(error, self.stage, self.partitioned.job.micro_batch))  # type: ignore[union-attr]
            raise

    def try_out(self) -> None:
        """Makes a trial run: runs micro-batch 0 with zeros from the previous stage, until the shapes are known."""
        job = self.partitioned.job
        assert job is not None
        self._is_trial = job.is_trial = True
        try:
            self.micro_batch = 0
            self()
        except Exception:  # perhaps because of the zeros; what was found until then is used
            if not (self.is_last and self.is_live):
                raise
            self.partitioned.failure = None
        finally:
            self._is_trial = job.is_trial = False
            self._content.end_trial(is_known=self.is_last and not self.is_live)

    def _run(self, received: tuple[Tensor, ...] | None, index: int) -> Any:
        partitioned, job = self.partitioned, self.partitioned.job
        assert job is not None
        self._index, self._received = index, received
        has_trained = bool(self.stage) or any(parameter.requires_grad for parameter in self.parameters())
        self._needs_gradients = torch.is_grad_enabled() and has_trained
        self.is_live = self._absent.tracks_mixing = self.stage == 0
        self._absent.mixing_line, self._absent.mixed_parameter = None, ""
        self._content.begin(job.shapes, is_trial=self._is_trial)
        job.begin(index, self.stage)
        # Nothing is recorded in the last stage's trial run, which may fail because of the zeros.
        records_now = (
            partitioned.written is not None
            and self.stage not in partitioned.written
            and not (self.is_last and self._is_trial)
        )
        self._recorder = (
            WriteRecorder(partitioned.module, parameters=partitioned.borrowed.allowed) if records_now else None
        )
        partitioned.active = self
        sent: Sequence[Tensor] | None = None
        output: Any = None
        try:
            with (
                job.context(),
                no_new_parameters(partitioned.parts),
                self._absent,
            ):
                output = job.step(index)
        except _EndOfStage as end:
            sent = end.tensors
            end.__traceback__ = None  # it keeps all tensors of the step alive
        finally:
            partitioned.active = self._received = None
        if self._recorder is not None:
            partitioned.written[self.stage] = self._recorder.end()  # type: ignore[index]
        self._content.end()
        if not job.is_trial:
            partitioned.parameter_writes.check(self.stage, job.num_micro_batches)
        if sent is not None:
            return self._to_send(sent)
        if not self.is_last or not self.is_live:
            first = partitioned.plan.stages[self.stage + self.is_live][0]
            raise CutError(f"the step returned without having called {self._name(first)}. {_REMEDY}")
        if has_absent(output):
            output = apply_to_collection(output, Tensor, self._absent.with_content)
        if has_absent(output):
            raise CutError(self._why_absent(output))
        if self._is_trial:
            return None
        return job.finish(index, output)

    def _why_absent(self, output: Any) -> str:
        """Returns the message for a step that returns a value which this stage does not have."""
        line, parameter = self._absent.mixing_line or "the step", self._absent.mixed_parameter
        if parameter:
            return (
                f"{line} uses {parameter!r} behind the blocks, but what is registered before them belongs to the first"
                " pipeline stage: assign its module to an attribute behind them in the constructor (if it is used"
                " before them too: another module that shares the parameter), give the module a method"
                " pipeline_stages(), or choose another strategy, such as 'fsdp'."
            )
        origin = _origin(output)
        return (
            f"{line} needs what an earlier pipeline stage has{origin}, together with what the last one has, for what"
            f" the step returns. {_REMEDY}"
        )

    def come_to(self, stage: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called where the step comes to a unit: fills its arguments, or ends this stage's part.

        Args:
            stage: the stage that the unit belongs to.
            args: arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if self._recorder is not None and stage <= self.stage:
            with self._absent.paused():
                self._recorder.enter(stage)
        if stage == self.stage + 1 and self.is_live:
            if self._needs_gradients and not torch.is_grad_enabled():
                raise CutError(self._why_no_gradients())
            raise _EndOfStage(self._offer(list(tensors_in((args, kwargs)))))
        if stage == self.stage and not self.is_live:
            return self._receive(args, kwargs)
        return args, kwargs

    def call(self, unit: nn.Module, stage: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit that the step calls, if it is one of this stage; returns its output, maybe without content.

        Args:
            unit: the sub-module.
            stage: the stage that the unit belongs to.
            forward: the unit's own forward.
            args: arguments of the call.
            kwargs: keyword arguments of the call.
        """
        job = self.partitioned.job
        assert job is not None
        number, calls = self.partitioned.numbers[unit], self._calls.count
        if stage < self.stage and not self.is_live:
            form = job.shapes.units.get(number)
            if form is None:
                return forward(*args, **kwargs)
            output = _without_content(form, self.partitioned.names[unit])
            return self._counted(output, unit, calls)
        if stage != self.stage:
            raise CutError(
                f"{users_line()} calls {self._name(unit)} out of order, or once more behind the blocks of another"
                " stage. Two views of a batch can go through the blocks together:"
                " `a, b = self(torch.cat([a, b])).chunk(2)`. Blocks that are gone through several times, one after the"
                f" other, need another strategy, such as 'fsdp'. {_REMEDY}"
            )
        if has_absent((args, kwargs)):
            with self._absent.paused():
                args, kwargs = apply_to_collection((args, kwargs), Tensor, self._absent.with_content)
        if has_absent((args, kwargs)):
            raise CutError(
                f"{users_line()} gives {self._name(unit)} a value that only an earlier pipeline stage"
                f" has{_origin((args, kwargs))}. {_REMEDY}"
            )
        recording = self._recorder and self._recorder.unit(self.partitioned.names[unit], unit, (args, kwargs))
        watching = self.partitioned.around_unit and self.partitioned.around_unit(unit)
        with self._absent.paused(), self.partitioned.inside(), recording or nullcontext(), watching or nullcontext():
            output = forward(*args, **kwargs)
        if number not in job.shapes.units:
            _check_all_seen(output, f"{self._name(unit)} returns")
            job.shapes.units[number] = flatten_tree(output)[0]
        return self._counted(output, unit, calls)

    def _counted(self, output: Any, unit: nn.Module, calls: int) -> Any:
        """Counts a unit as one call, however many calls it made, and returns its output."""
        with self._absent.paused():
            self._calls.count = calls
            self._calls.note(repr(self.partitioned.names[unit]), flatten_tree(output)[1])
        return output

    def _receive(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of this stage's first unit, filled with what the stage has received."""
        job, tensors = self.partitioned.job, list(tensors_in((args, kwargs)))
        assert job is not None
        with self._absent.paused():
            received = self._content.begin_trial_part(tensors) if self._is_trial else self._received
            if received is None or (self._is_trial and self.is_last and not job.trial_has_last_stage):
                raise _EndOfStage(())
            self._content.fill(tensors, received)
        self.is_live = self._absent.tracks_mixing = True
        self._content.begin_own_part()
        job.resume(self._index, self.stage)
        return self.partitioned.filled.fill_arguments(args, kwargs)

    def _offer(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors for the next stage: the arguments of its first unit that it lacks, and carried values."""
        with self._absent.paused():
            tensors = self._content.offered(tensors)
        shapes = self.partitioned.job.shapes  # type: ignore[union-attr]
        if self.stage + 1 not in shapes.needed:  # a trial run
            shapes.offered[self.stage] = [None if tensor.is_meta else shape_of(tensor) for tensor in tensors]
            return []
        sent = [tensors[index] for index in shapes.needed[self.stage + 1] if index < len(tensors)]
        sent += [self._content.result_of(key) for key in shapes.carried[self.stage + 1]]
        expected = shapes.sent(self.stage)
        if shapes_and_dtypes(sent) != shapes_and_dtypes(expected):  # they would arrive in buffers of other sizes
            next_unit = self._name(self.partitioned.plan.stages[self.stage + 1][0])
            raise CutError(
                f"{users_line()} gives {next_unit} tensors {form_text(sent)}, but gave it {form_text(expected)} for the"
                " first batch of this batch's shapes, and the next stage expects these again. Give the batch itself the"
                " new size (in the DataLoader, or in on_after_batch_transfer), pad to one size, or choose another"
                " strategy, such as 'fsdp'."
            )
        return sent

    def _to_send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Makes the tensors contiguous, and floating ones require a gradient: the next stage expects one from each."""
        trains = torch.is_grad_enabled() and bool(tensors)
        if trains and self._needs_gradients and not any(tensor.requires_grad for tensor in tensors):
            raise CutError(self._why_no_gradients())
        # torch: `zero-bubble` detaches a stage's outputs in place, which views do not allow.
        return tuple(
            (tensor.clone() if tensor._is_view() else tensor).contiguous()
            if tensor.requires_grad or not (trains and tensor.is_floating_point())
            else tensor.detach().contiguous().requires_grad_()
            for tensor in tensors
        )

    def _why_no_gradients(self) -> str:
        next_unit = self._name(self.partitioned.plan.stages[self.stage + 1][0])
        return (
            f"the arguments of {next_unit} have no gradient, though there is something to train before it: call units"
            " with gradients, and name others than those in a method pipeline_stages() if they are not to have any;"
            " around them, torch.utils.checkpoint needs use_reentrant=False."
        )

    def _name(self, unit: nn.Module) -> str:
        return repr(self.partitioned.names[unit])


def _check_all_seen(value: Any, where: str) -> None:
    """Checks that no tensor is in an object which is not looked into, so that it would not be sent.

    Raises:
        CutError: there is one.
    """
    seen = set(map(id, tensors_in(value)))
    unseen = (holder for tensor, holder in Contents((), (value,)).take_tensors() if id(tensor) not in seen)
    if (holder := next(unseen, None)) is not None:
        raise CutError(
            f"{where} an object of {type(holder).__name__}, whose tensors a pipeline does not see and can't send: make"
            " it a dataclass, a tuple or a dict, or choose another strategy, such as 'fsdp'."
        )


def _origin(value: Any) -> str:
    """Describes where the absent tensors of a value come from; "" if that is not known."""
    names = dict.fromkeys(origin_of(tensor) for tensor in tensors_in(value) if tensor.is_meta)
    text = " and ".join(repr(name) for name in names if name)
    return f" (it comes from {text})" if text else ""


def _without_content(form: Any, origin: str) -> Any:
    def absent(slot: TensorSlot) -> Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        mark_origin(tensor, origin)
        return tensor

    return apply_to_collection(form, TensorSlot, absent)


# --- errors of the user's step, in words


def describe_failure(error: Exception, stage: int, micro_batch: str) -> str:
    """Returns an error message: what happened, where, and why it may happen in a pipeline only.

    Args:
        error: with its traceback.
        stage: the stage that ran the step.
        micro_batch: the micro-batch in words, for the message.
    """
    if isinstance(error, CutError):  # its message is complete
        return f"pipeline stage {stage} failed: {error}"
    frames = list(traceback.walk_tb(error.__traceback__))
    places = traceback.StackSummary.extract(iter(frames))
    of_user = [frame_line for (frame, _), frame_line in zip(frames, places, strict=True) if is_of_program(frame)]
    if of_user and any(frame.f_code is torch.autograd.grad.__code__ for frame, _ in frames):
        p = of_user[-1]
        return (
            f'pipeline stage {stage} failed: {p.filename}:{p.lineno} in {p.name}: "{p.line}" asks for a gradient within'
            " the step, but no pipeline stage has the whole graph, and so none can give the gradient of a gradient, as"
            " create_graph=True needs, for example for a gradient penalty: choose another strategy, such as 'fsdp'."
            f" torch says: {error}"
        )
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = "".join(f', {p.filename}:{p.lineno} in {p.name}: "{p.line}"' for p in of_user[-1:])
    if places and places[-1] not in of_user[-1:]:
        inner = places[-1]
        where += f', raised by {inner.filename}:{inner.lineno} in {inner.name}: "{inner.line}"'
    return (
        f"pipeline stage {stage} failed: {message}{where}. The step ran with {micro_batch}, and values that depend on"
        " parameters of other stages have only a shape there. If it does not fail in one process: before the blocks,"
        " do not use the batch's size or such values, or set microbatches=1 with schedule=gpipe, or choose another"
        " strategy, such as 'fsdp'."
    )
