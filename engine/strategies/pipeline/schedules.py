"""Schedules, the order in which a rank runs its stages: those of torch, with a clock.

`gpipe` (arXiv:1811.06965): all forwards, then all backwards. `1f1b` (arXiv:1806.03377, flushed): the same bubble, with
activations of at most `pipeline_size` micro-batches. `interleaved` (arXiv:2104.04473): several smaller stages per rank,
which divides the bubble by their number. `zero-bubble` (arXiv:2401.10241, ZB1P): weight gradients fill the bubble.

Imported before any process group exists: torch's modules bind the default group into defaults of functions, which
would otherwise outlive `destroy_process_group` and abort the process at exit under gloo.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

from ...compression.counting_group import CountingGroup, TrafficKey, seconds_between, timestamp
from ...phases import waits_are

__all__ = ["Clock", "Stage", "make_schedule", "num_micro_batches"]

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


def num_micro_batches(size: int, largest: int) -> int:
    """Returns the largest number of equal micro-batches of `size` samples that is at most `largest`."""
    return next(number for number in range(min(size, largest), 0, -1) if size % number == 0)


def make_schedule(name: str, stages: Sequence["Stage"], num_micro_batches: int, *, trains: bool) -> Any:
    """Returns the schedule of that name; for a short batch, the nearest one that can run so few micro-batches.

    Args:
        name: name of the flag.
        stages: stages of this rank.
        num_micro_batches: number of micro-batches of the batch.
        trains: whether backward runs as well.
    """
    num_ranks = stages[0].group_size
    # torch's schedules with several stages per rank require this.
    is_even = num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
    arguments: dict[str, Any] = {"loss_fn": _loss if trains else None, "scale_grads": False}
    if name in _MULTI or len(stages) > 1:
        kind = _MULTI[name] if trains and is_even else ScheduleLoopedBFS
        return kind(list(stages), num_micro_batches, **arguments)
    kind = _SINGLE[name] if trains and num_micro_batches >= num_ranks else ScheduleGPipe
    return kind(stages[0], num_micro_batches, **arguments)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the last stage's output, which is the loss."""
    return output


_MEASURED = range(2, 22)
"""The schedules that are measured: the first two may compile kernels, and the figures of twenty are steady."""


class Clock:
    """Measures how long this rank computes, and how long its schedules take.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_steps = 0
        self.is_running = False
        """Whether the current schedule is measured."""
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def step(self, run: Callable[[], Any], *, counts: bool) -> None:
        """Runs a schedule.

        Args:
            run: runs it.
            counts: whether this schedule is one of those to measure.
        """
        self.is_running = counts and self._num_steps in _MEASURED
        start = timestamp(self._device)
        with waits_are("bubble"):
            run()
        if self.is_running:
            self._steps.append((start, timestamp(self._device)))
        self.is_running = False
        self._num_steps += counts

    def forget(self) -> None:
        """Forgets all measurements and starts to count from 0."""
        self._num_steps = 0
        self._spans.clear()
        self._steps.clear()

    def span(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs and measures a part of a schedule in which this rank computes; returns its result."""
        with waits_are("communication"):
            return self._span(compute, *args, **kwargs)

    def _span(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_running:
            return compute(*args, **kwargs)
        start = timestamp(self._device)
        result = compute(*args, **kwargs)
        self._spans.append((start, timestamp(self._device)))
        return result

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds in which this rank computed, and those of all schedules; waits for the device."""
        busy, total = (sum(seconds_between(*span) for span in spans) for spans in (self._spans, self._steps))
        return busy, total


class Stage(PipelineStage):
    """torch's `PipelineStage`, with a clock and a count of the bytes sent."""

    clock: Clock

    def __init__(self, part: nn.Module, *args: Any, clock: Clock, wire: CountingGroup, **kwargs: Any) -> None:
        super().__init__(part, *args, **kwargs)
        self.clock = clock
        self._wire = wire
        self._part: Any = part

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces gradients under FSDP2, if backward runs."""
        if self.has_backward:
            with waits_are("communication"):
                super().perform_reduce_grad(grad_scale_factor)

    # torch: it clears gradients and frees parameters after it has run the stage to infer shapes; ours are given.
    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing: under FSDP2, gradients of earlier batches and gathered parameters stay."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Returns the sends of activations to the next stage, and counts their bytes."""
        return self._counted("send_activations", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Returns the sends of gradients to the previous stage, and counts their bytes."""
        return self._counted("send_gradients", super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, name: str, sends: list[Any]) -> list[Any]:
        if sends:
            self._wire.sent[TrafficKey(name, self.stage_index)] += sum(send.tensor.nbytes for send in sends)
        return sends

    # torch: all schedules call these methods of PipelineStage's base class.
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs forward of a micro-batch, and measures it."""
        self._part.micro_batch = fwd_chunk_id
        return self.clock.span(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs backward of a micro-batch, and measures it."""
        return self.clock.span(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the gradients of weights, where the schedule does this apart from backward, and measures it."""
        return self.clock.span(super().backward_weight_one_chunk, *args, **kwargs)
