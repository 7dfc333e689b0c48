"""The order in which a rank runs its stages: torch's own schedules, and a clock in them.

`gpipe` (arXiv:1811.06965): all forwards, then all backwards. `1f1b` (arXiv:1806.03377, flushed): the same bubble, with
activations of at most `stages` micro-batches. `interleaved` (arXiv:2104.04473): several smaller stages per rank, which
divides the bubble by their number. `zero-bubble` (arXiv:2401.10241, ZB1P): weight gradients fill the bubble.

Imported before the process group is started: see `launch.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

from ...compression.wire import Sent, Wire, mark, seconds_between

__all__ = ["Clock", "Stage", "make_schedule", "num_micro_batches"]

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


def num_micro_batches(size: int, wanted: int) -> int:
    """The largest number of equal micro-batches of `size` samples that is not above `wanted`."""
    return next(number for number in range(min(size, wanted), 0, -1) if size % number == 0)


def make_schedule(name: str, stages: Sequence["Stage"], num_micro_batches: int, *, trains: bool) -> Any:
    """The schedule of that name; the nearest one that can do as few micro-batches as a short batch makes.

    Args:
        name: of the flag.
        stages: this rank's.
        num_micro_batches: that are run.
        trains: backward as well.
    """
    num_ranks = stages[0].group_size
    # What torch's schedules of several stages per rank ask for.
    is_even = num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
    arguments: dict[str, Any] = {"loss_fn": _loss if trains else None, "scale_grads": False}
    if name in _MULTI or len(stages) > 1:
        kind = _MULTI[name] if trains and is_even else ScheduleLoopedBFS
        return kind(list(stages), num_micro_batches, **arguments)
    kind = _SINGLE[name] if trains and num_micro_batches >= num_ranks else ScheduleGPipe
    return kind(stages[0], num_micro_batches, **arguments)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage's output is the loss."""
    return output


class Clock:
    """Measures how long this rank computes, and how long its schedules take.

    Args:
        device: whose time it is.
        steps: which schedules are measured, from the first number to before the second.
    """

    def __init__(self, device: torch.device, steps: tuple[int, int] = (2, 22)) -> None:
        self._device = device
        self._first, self._last = steps
        self._num_steps = 0
        self.is_running = False
        """Whether the present schedule is measured."""
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def step(self, run: Callable[[], Any], *, counts: bool) -> None:
        """Runs a schedule, which counts as one of those that are to be measured, or does not."""
        self.is_running = counts and self._first <= self._num_steps < self._last
        start = mark(self._device)
        run()
        if self.is_running:
            self._steps.append((start, mark(self._device)))
        self.is_running = False
        self._num_steps += counts

    def forget(self) -> None:
        """Begins anew, with none measured."""
        self._num_steps = 0
        self._spans.clear()
        self._steps.clear()

    def span(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Computes a part of it."""
        if not self.is_running:
            return compute(*args, **kwargs)
        start = mark(self._device)
        result = compute(*args, **kwargs)
        self._spans.append((start, mark(self._device)))
        return result

    def seconds(self) -> tuple[float, float]:
        """Computing, and in all; waits for the device."""
        busy, total = (sum(seconds_between(*each) for each in spans) for spans in (self._spans, self._steps))
        return busy, total


class Stage(PipelineStage):
    """torch's, with a clock and a count of what is sent."""

    clock: Clock

    def __init__(self, part: nn.Module, *args: Any, clock: Clock, wire: Wire, **kwargs: Any) -> None:
        super().__init__(part, *args, **kwargs)
        self.clock = clock
        self._wire = wire

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces gradients under FSDP2, where there are some."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # torch: before a schedule's first step, for what it computes to find out shapes; ours are given.
    def _post_metadata_inference_cleanup(self) -> None:
        """Leaves gradients of the batches before, and gathered parameters, as they are under FSDP2."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Activations to the next stage, counted."""
        return self._counted("send_activations", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Their gradients to the previous one, counted."""
        return self._counted("send_gradients", super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, name: str, sends: list[Any]) -> list[Any]:
        if sends:
            self._wire.sent[Sent(name, self.stage_index)] += sum(send.tensor.nbytes for send in sends)
        return sends

    # torch: what all schedules call, of PipelineStage's base.
    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a micro-batch."""
        return self.clock.span(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Backward of a micro-batch."""
        return self.clock.span(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the gradients of weights, where backward does that as a step of its own."""
        return self.clock.span(super().backward_weight_one_chunk, *args, **kwargs)
