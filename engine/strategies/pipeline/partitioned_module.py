"""A module whose units are divided among pipeline stages, and the step that its stages run."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ...distributed.object_group import ObjectGroup
from .attribute_writes import AttributeGuard, StageWrites
from .parameter_writes import ParameterWrites
from .plan import StagePlan
from .received_values import BorrowedParameters, FilledTensors
from .shapes import Shapes

if TYPE_CHECKING:
    from .stage_module import StageModule

import sys
import threading
import types

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..._compat.torch import _functional_collectives
from .remote_values import CutError, is_of_dtensor, is_of_fsdp, is_of_program, users_line

__all__ = ["NoCollectives", "PartitionedModule", "StepJob"]


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


# --- the refusal of collectives of the user's step and of its backward, other than `self.all_gather`
# The stages of a pipeline come to such a call at different times, or not at all, so the job would wait for the rest of
# its `timeout_s`. Ranks that run the same stage with other samples come to it together, but run the step different
# numbers of times: in trial runs, and with batches of other sizes. `self.all_gather` takes care of both.
#
# Functions of `torch.distributed` call one function each before they begin, which is replaced while a step runs. So a
# call is seen in every batch, however the user has imported it, and other operations of the step cost nothing. Backward
# may run in threads of torch's autograd, which begin with the user's function or hook.


_MODES = ("__torch_function__", "__torch_dispatch__")
"""Methods of a user's mode of torch, around `fit` for example: a call of the engine's passes through them, too."""


class NoCollectives:
    """A context of a batch that raises an error where the user's code begins a collective of several ranks.

    Args:
        is_running: whether the stages run. After them, hooks of parameters may compute with split gradients, which the
            ranks with the other parts do, too.
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._originals: tuple[Callable[..., Any], Callable[..., Any]]
        self._begin: Any = None
        """The frame that has entered the context: the user's code is called by what this calls."""
        self._is_paused = False
        """Whether the engine communicates in the step."""

    def __enter__(self) -> None:
        self._begin = sys._getframe(1)
        # torch: what its functions call with the group of ranks.
        self._originals = distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group
        distributed_c10d._rank_not_in_group = self._checking(self._originals[0])
        _functional_collectives._resolve_group = self._checking(self._originals[1])

    def __exit__(self, *error: object) -> None:
        distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group = self._originals
        self._begin = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context around a collective of the engine."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _checking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check(group: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            is_question = caller.f_code.co_name.startswith("get_")  # such as dist.get_rank()
            if not (is_question or self._is_paused or _is_alone(group)) and self._is_of_user(caller):
                raise CutError(
                    f"{users_line()} communicates with other ranks ({caller.f_code.co_name}), which in a pipeline come"
                    " to this place of the step at another time or not at all. Communicate in a hook, such as"
                    " on_train_batch_end, which all ranks call once a batch; log values with"
                    " `self.log(..., sync_dist=True)`; gather values of the ranks with other samples by"
                    " `self.all_gather`; or choose another strategy, such as 'fsdp'."
                )
            return original(group, *args)

        return check

    def _is_of_user(self, frame: types.FrameType | None) -> bool:
        """Whether the user's step, or its backward, makes a call; not FSDP2, nor a thread of the user's own."""
        is_user = False
        caller = frame
        while frame is not None and frame is not self._begin:
            if frame.f_code.co_filename == threading.__file__:
                return False
            is_user |= is_of_program(frame) and frame.f_code.co_name not in _MODES
            frame = frame.f_back
        return is_user and not is_of_fsdp(caller) and (self._is_running() or not is_of_dtensor(caller))


def _is_alone(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() == 1
