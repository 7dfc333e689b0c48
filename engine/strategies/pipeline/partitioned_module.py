"""A module whose units are divided among pipeline stages, and the step that its stages run."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attribute_guard import AttributeGuard
from .attribute_writes import StageWrites
from .loans import BorrowedParameters
from .plan import StagePlan
from .received_values import FilledTensors
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
        micro_batch: a micro-batch in words, for messages.
        trial_has_last_stage: whether the trial run includes the last stage's part; False once its values are known.
    """

    step: Callable[[int], Any]
    begin: Callable[[int, int], None]
    resume: Callable[[int, int], None]
    finish: Callable[[int, Any], Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    shapes: Shapes
    micro_batch: str = "a micro-batch"
    trial_has_last_stage: bool = True


class PartitionedModule:
    """A module whose units run as parts of pipeline stages.

    Args:
        module: changed in place.
        plan: plan of its stages.
        device: device of this rank's parameters.
        own_stages: the stages of this rank.
        lends: whether stages may use parameters that other stages hold.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        device: torch.device,
        own_stages: Sequence[int],
        *,
        lends: bool = True,
    ) -> None:
        self.module, self.plan, self.device = module, plan, device
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
        self.written: dict[int, StageWrites] | None = None
        """The attributes that each stage writes in a step, while they are recorded; else None."""
        self.filled = FilledTensors()
        self.borrowed = BorrowedParameters(module, allowed=lends)
        self.buffer_stages: dict[str, int] = {}
        """Maps the name of a buffer to the one stage that writes it."""
        self.numbers = {unit: number for number, unit in enumerate(unit for stage in plan.stages for unit in stage)}
        for stage, units in enumerate(plan.stages):
            for unit in units:
                unit.forward = _UnitForward(self, unit, stage, unit.forward)

    def name_of(self, unit: nn.Module) -> str:
        """Returns the first name of a sub-module."""
        return next(name for name, submodule in self.module.named_modules() if submodule is unit)

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

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context around the forward of a unit of this rank."""
        before, self.guard.inside = self.guard.inside, True
        try:
            yield
        finally:
            self.guard.inside = before


class _UnitForward:
    """Replaces the forward of a unit."""

    def __init__(
        self, partitioned: PartitionedModule, unit: nn.Module, stage: int, forward: Callable[..., Any]
    ) -> None:
        self._partitioned, self._unit, self._stage, self._forward = partitioned, unit, stage, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._partitioned.active
        if part is None:  # called by a hook of the user, or recomputed in backward
            args, kwargs = self._partitioned.filled.fill_arguments(args, kwargs)
            with self._partitioned.inside():
                return self._forward(*args, **kwargs)
        return part.call(self._unit, self._stage, self._forward, args, kwargs)
