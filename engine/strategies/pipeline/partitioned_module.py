"""A module whose units are divided among pipeline stages, and the step that its stages run."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ...distributed.object_group import ObjectGroup
from ..callers import CutError
from ..collectives import NoCollectives
from .attribute_writes import AttributeGuard, Key, StageWrites
from .parameter_writes import ParameterWrites
from .plan import StagePlan
from .reachable_state import sums
from .received_values import BorrowedParameters, FilledTensors
from .shapes import Shapes

if TYPE_CHECKING:
    from .stage_module import StageModule

__all__ = ["PartitionedModule", "StepJob"]


@dataclasses.dataclass
class StepJob:
    """A step of the module that is run for each micro-batch of a batch.

    Attributes:
        step: runs micro-batch i.
        begin: called before micro-batch i, with i and the stage.
        resume: called with i and the stage where the stage's own part begins.
        finish: turns the step's output for micro-batch i into the scalar that the schedule uses as a loss.
        context: entered around each micro-batch.
        shapes: shapes of this kind of micro-batch; a trial run fills them in.
        num_micro_batches: their number.
        micro_batch: a micro-batch in words, for messages.
        trial_has_last_stage: whether the trial run includes the last stage's part; False once its values are known.
        is_first: whether this is the step's first batch.
        is_trial: whether the step is tried out, which other ranks may do another number of times.
        is_agreed: whether the ranks of the stage have found that they run it the same number of times.
    """

    step: Callable[[int], Any]
    begin: Callable[[int, int], None]
    resume: Callable[[int, int], None]
    finish: Callable[[int, Any], Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    shapes: Shapes
    num_micro_batches: int = 1
    micro_batch: str = "a micro-batch"
    trial_has_last_stage: bool = True
    is_first: bool = False
    is_trial: bool = False
    is_agreed: bool = False


class PartitionedModule:
    """A module whose units run as parts of pipeline stages.

    Args:
        module: changed in place.
        plan: plan of its stages.
        device: device of this rank's parameters.
        own_stages: the stages of this rank.
        lends: whether stages may use parameters that other stages hold.
        watches_writes: whether to watch writes into parameters: not those of FSDP2, which has copies of them, nor those
            of compiled units, which take no parameters of another class.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        device: torch.device,
        own_stages: Sequence[int],
        *,
        lends: bool = True,
        watches_writes: bool = True,
    ) -> None:
        self.module, self.plan, self.device = module, plan, device
        self.collectives = NoCollectives(lambda: self.job is not None)
        self.job: StepJob | None = None
        """The current job; None between batches."""
        self.active: StageModule | None = None
        """The stage that runs the step now; None outside of the step."""
        self.failure: Exception | None = None
        """The exception that the user's step raised, which torch's schedules wrap."""
        self.guard = AttributeGuard(
            module,
            plan,
            set(own_stages),
            lambda: None if self.active is None else self.active.stage,
            lambda: self.active is not None and self.active.is_live,
        )
        self.around_unit: Callable[[nn.Module], AbstractContextManager[None]] | None = None
        """Entered around the forward of a unit of this rank, where it is watched."""
        self.written: dict[int, StageWrites] | None = None
        """The attributes that each stage writes in a step, while they are recorded; else None."""
        self.filled = FilledTensors()
        self.borrowed = BorrowedParameters(module, allowed=lends)
        self.buffer_stages: dict[str, int] = {}
        """Maps the name of a buffer to the one stage that writes it."""
        self._sums: dict[str, Any] | None = None
        """Sums of each buffer at the start of training."""
        self.numbers = {unit: number for number, unit in enumerate(unit for stage in plan.stages for unit in stage)}
        self.parts = {part: name for name, part in module.named_modules()}
        """The first name of each sub-module."""
        self.names = {unit: self.parts[unit] for unit in self.numbers}
        self.own_parameters: dict[int, list[nn.Parameter]] = {}
        """For each stage of this rank the parameters that it holds, if writes into them are watched."""
        if watches_writes:
            for stage in own_stages:
                self.own_parameters[stage] = [p for p in module.parameters() if stage in plan.holders[p]]
        self.parameter_writes = ParameterWrites(self.own_parameters, self.name_of)
        for stage, units in enumerate(plan.stages):
            for unit in units:
                unit.forward = _UnitForward(self, unit, stage, unit.forward)
                # In front of the user's hooks, backward hooks included: these see what the stage has received.
                unit.register_forward_pre_hook(_Border(self, stage), prepend=True, with_kwargs=True)

    def name_of(self, parameter: Tensor) -> str:
        """Returns the first name of a parameter of the module."""
        return next(name for name, other in self.module.named_parameters() if other is parameter)

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a buffer of the module."""
        return any(tensor is buffer for buffer in self.module.buffers())

    def owners(self, held: dict[str, int], num_ranks: int) -> dict[str, int]:
        """Maps the name of each buffer to the rank whose values are saved.

        Args:
            held: for each name the rank that holds the buffer; if a stage writes the buffer, that rank counts.
            num_ranks: number of ranks of the pipeline.
        """
        return held | {name: stage % num_ranks for name, stage in self.buffer_stages.items()}

    def note_buffers(self) -> None:
        """Called on all ranks when the values of buffers are equal on them: at the start of training."""
        named = self.module.named_buffers(remove_duplicate=False)
        self._sums = {name: sums(buffer) for name, buffer in named}

    def find_writers(self, ranks: ObjectGroup) -> list[Key]:
        """Finds the buffers that some ranks alone have written since; all ranks of the pipeline call it.

        The steps that were recorded show what they wrote, but not what others write: every tenth one, or one whose
        values are large. Of what a single rank has written this one has the value of one process.

        Args:
            ranks: the ranks of the pipeline.

        Returns:
            The buffers that were not known to be written.

        Raises:
            CutError: several ranks have written a buffer, each its own.
        """
        if self._sums is None:
            return []
        now = {name: sums(buffer) for name, buffer in self.module.named_buffers(remove_duplicate=False)}
        changed = {name: value for name, value in now.items() if name in self._sums and self._sums[name] != value}
        of_ranks = ranks.all_gather_object(changed)
        written: list[Key] = []
        for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
            writers = [rank for rank, of_rank in enumerate(of_ranks) if name in of_rank]
            first, *others = (of_ranks[rank][name] for rank in writers)
            part, _, attribute = name.rpartition(".")
            key = self.parts[self.module.get_submodule(part)], attribute  # of a part that has several names the first
            is_by_all = len(writers) == len(of_ranks) and all(other == first for other in others)
            if is_by_all or key in self.guard.written:
                continue
            if others:
                raise CutError(self.guard.conflict_text(key, dict.fromkeys(writers, "a step")))
            written.append(key)
            self.buffer_stages[name] = writers[0]
        return written

    def state_dict(self, ranks: ObjectGroup, num_ranks: int) -> dict[str, Any]:
        """Returns the module's state dict, in which each stage has filled in what is neither parameter nor buffer.

        Examples are the extra state of modules, and what a hook or a `state_dict` of the user's adds. A hook and an
        extra state of another stage's module run here, too; their results are replaced by those of its own stage.

        Args:
            ranks: the ranks of this pipeline; all of them call it.
            num_ranks: their number.
        """
        self.guard.saves = True
        try:
            state = self.module.state_dict()
        finally:
            self.guard.saves = False
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        owners = {key: self._stage_of(key) % num_ranks for key in state if key not in names}
        if not owners:  # on no rank, since all have the same modules
            return state
        # A tensor on the meta device is a parameter of another stage, under another name.
        own = {key: state[key] for key in owners if not (isinstance(state[key], Tensor) and state[key].is_meta)}
        for rank, values in enumerate(ranks.all_gather_object(own)):
            state.update({key: value for key, value in values.items() if owners.get(key) == rank})
        return state

    def _stage_of(self, key: str) -> int:
        """Returns the stage of the innermost module that a key of a state dict begins with."""
        part, last = self.module, self.plan.num_stages - 1
        stage = 0
        for name in key.split("."):
            if name not in part._modules or (child := part._modules[name]) is None:
                break
            part = child
            stage = last if isinstance(part, Metric) else self.plan.modules[part][0]
            if isinstance(part, Metric):
                break
        return stage

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context around the forward of a unit of this rank."""
        before, self.guard.inside = self.guard.inside, True
        try:
            yield
        finally:
            self.guard.inside = before


class _Border:
    """A forward pre-hook of a unit: the border between the stage before it and its own."""

    def __init__(self, partitioned: PartitionedModule, stage: int) -> None:
        self._partitioned, self._stage = partitioned, stage

    def __call__(self, unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        part = self._partitioned.active
        if part is None:  # called by a hook of the user, or recomputed in backward
            return self._partitioned.filled.fill_arguments(args, kwargs)
        return part.come_to(self._stage, args, kwargs)


class _UnitForward:
    """Replaces the forward of a unit."""

    def __init__(
        self, partitioned: PartitionedModule, unit: nn.Module, stage: int, forward: Callable[..., Any]
    ) -> None:
        self._partitioned, self._unit, self._stage, self.original = partitioned, unit, stage, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._partitioned.active
        if part is None:  # called by a hook of the user, or recomputed in backward
            with self._partitioned.inside():
                return self.original(*args, **kwargs)
        return part.call(self._unit, self._stage, self.original, args, kwargs)
