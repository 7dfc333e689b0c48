"""Tells whether a step can be run in micro-batches and stages, by what its micro-batches leave behind.

**State that advances once a micro-batch.** What a micro-batch leaves behind, and the next one uses, advances several
times a batch.

In one process it advances once a batch. Examples are a number of calls, an average of activations, a memory of earlier
inputs, whether it is kept on a block, in an object, by a class or as a global. What a micro-batch leaves behind and
none reads (an auxiliary loss), or what is the same for all (a table of positions), is no such state. A stage runs
micro-batches 0 and 1 in both orders, each time from the state at the beginning. For random values in place of what it
would receive, it compares the state and the outputs of a micro-batch that came first with those of the same micro-batch
that came second.

**What a block writes where other stages do not see it**: into a list of its file, an attribute of a class, a variable
of a function. `AttributeGuard` knows attributes of modules only.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .attribute_writes import REMEDY
from .parameter_writes import KeptValues, advances_text
from .reachable_state import Place, ReachableState, sums
from .remote_values import tensors_in
from .shapes import zeros_of
from .stage_module import StageModule

__all__ = ["state_problem"]

_Run = tuple[list[Any], dict[Place, Any]]
"""The sums of what a stage returned, and the state after it."""


def state_problem(stage: StageModule, number: int) -> str | None:
    """Returns what is wrong if micro-batches of a stage depend on each other; None if they do not.

    Args:
        stage: the stage, after a trial run.
        number: number of micro-batches of a batch.
    """
    partitioned, written = stage.partitioned, stage.partitioned.written
    job = partitioned.job
    assert job is not None
    partitioned.written = None
    partitioned.job = dataclasses.replace(job, finish=lambda index, output: output, is_trial=True)
    state = ReachableState(partitioned.module, parameters=partitioned.borrowed.allowed)
    undo_state, kept = state.snapshot(), KeptValues(partitioned.own_parameters)

    def undo() -> None:
        undo_state()
        kept.undo()

    try:
        # Random values show more than zeros, but code that checks values may refuse them.
        for make in (_random_of, zeros_of):
            try:
                with kept:
                    return _problem(stage, state, undo, make, number)
            except Exception:  # with the batch's own values it may go well
                continue
        return None
    finally:
        undo()
        partitioned.job, partitioned.written, partitioned.failure = job, written, None
        partitioned.around_unit = None
        partitioned.filled.clear()


def _problem(
    stage: StageModule,
    state: ReachableState,
    undo: Callable[[], None],
    make: Callable[[Tensor, torch.device], Tensor],
    number: int,
) -> str | None:
    job, device = stage.partitioned.job, stage.partitioned.device
    assert job is not None
    sent = job.shapes.sent(stage.stage - 1) if stage.stage else ()
    received = [[make(shape, device) for shape in sent] for _ in range(min(2, number))]
    module, last = stage.partitioned.module, len(received) - 1
    written_outside: list[tuple[nn.Module, Place]] = []

    @contextmanager
    def watch(unit: nn.Module) -> Iterator[None]:
        before = state.marks_outside()
        yield
        written_outside.extend((unit, place) for place in sorted(_different(before, state.marks_outside())))

    def run(index: int) -> _Run:
        stage.micro_batch = index
        output = stage(*(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received[index]))
        stage.partitioned.filled.clear()
        return [_coarse(tensor) for tensor in tensors_in(output)], state.marks()

    undo()
    before = state.marks()
    first = run(0)
    stage.partitioned.around_unit = watch  # not in the first micro-batch, which fills caches
    then_second = run(last)
    stage.partitioned.around_unit = None
    if written_outside and stage.partitioned.plan.num_stages > 1:
        unit, place = written_outside[0]
        return (
            f"the block {stage.partitioned.names[unit]!r} writes into {place.text(module)}, but the pipeline stages"
            f" that skip the block do not. {REMEDY}"
        )
    if number == 1:
        return None
    undo()
    second, then_first = run(1), run(0)
    pairs = (first, then_first), (second, then_second)
    places = {place for alone, after in pairs for place in _different(alone[1], after[1])}
    depends = any(alone[0] != after[0] for alone, after in pairs)
    if not places and not depends:
        return None
    undo()
    before_again, again = state.marks(), run(0)
    # What differs though it began equal (a time of day) is no state.
    places -= _different(first[1], again[1]) - _different(before, before_again)
    if kept := sorted(place for place in places if place.kind != "buffer"):  # of buffers `buffers_warning` warns
        return advances_text(kept[0].text(module), number)
    changed = _different(before, first[1])
    if depends and again[0] == first[0] and not any(place.kind == "buffer" for place in changed):
        names = [place.text(module) for place in sorted(changed)[:3]] or ["something that it keeps where none looks"]
        return advances_text(" or ".join(names), number)
    return None


def _different(a: dict[Place, Any], b: dict[Place, Any]) -> set[Place]:
    return {place for place in a.keys() | b.keys() if place not in a or place not in b or a[place] != b[place]}


def _random_of(shape: Tensor, device: torch.device) -> Tensor:
    values = zeros_of(shape, device)
    return values.detach().normal_().requires_grad_(shape.requires_grad) if shape.is_floating_point() else values


def _coarse(tensor: Tensor) -> Any:
    """Returns what differs if the values of a stage's output do, but not by rounding in many layers."""
    return sums(tensor, rounding=1e-3)
