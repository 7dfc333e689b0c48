"""Cuts batches into micro-batches of equal size, merges their outputs, and finds modules whose result that changes."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..._compat.torch import _BatchNorm
from ...data.samples import NoSamplesError, num_samples, take_samples, tensors_in
from .attribute_writes import REMEDY, Key
from .parameter_writes import KeptValues, advances_text
from .reachable_state import Place, ReachableState, sums
from .shapes import Shapes, TensorSlot, zeros_of
from .stage_module import StageModule

__all__ = [
    "batch_norm_warning",
    "batch_size_of",
    "buffers_warning",
    "loss_warning",
    "merge_outputs",
    "split_batch",
    "state_problem",
    "take_rows",
]


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples of a batch.

    Raises:
        ValueError: it does not show.
    """
    if (size := num_samples(batch)) is None:
        raise ValueError(
            "a pipeline cuts each batch into micro-batches, but the number of samples does not show in this"
            f" {type(batch).__name__}: let the DataLoader yield tensors, or dicts, lists or dataclasses of them, with"
            " the samples in dim 0, or one list with a value for each sample."
        )
    return size


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cuts a batch into `num_parts` batches, as `take_samples` does.

    Raises:
        ValueError: a part of it has another length than the number of samples, or can't be cut.
    """
    if num_parts == 1:
        return [batch]
    width = batch_size_of(batch) // num_parts
    return [take_rows(batch, slice(number * width, (number + 1) * width)) for number in range(num_parts)]


def take_rows(batch: Any, rows: slice) -> Any:
    """Returns some samples of a batch.

    Raises:
        ValueError: see `split_batch`.
    """
    size = batch_size_of(batch)
    try:
        return take_samples(batch, size, rows)
    except NoSamplesError as error:
        raise ValueError(
            f"a pipeline cuts each batch of {size} samples into micro-batches, but it has {error}: let the DataLoader"
            " yield tensors with the samples in dim 0, lists with one value for each sample, and values that all"
            " samples share without dims or in a tuple, or set microbatches=1 with schedule=gpipe."
        ) from None


def merge_outputs(outputs: list[Any]) -> Any:
    """Merges the outputs of a step for the micro-batches: concatenates samples, takes means of floating scalars."""
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.stack(outputs).mean(0) if first.dim() == 0 and first.is_floating_point() else _rows(outputs)
    if isinstance(first, Mapping):
        return type(first)({key: merge_outputs([output[key] for output in outputs]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) or (isinstance(first, list) and all(isinstance(value, Tensor) for value in first)):
        parts = [merge_outputs(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, list):
        return [value for output in outputs for value in output]  # for example one for each sample
    return sum(outputs) / len(outputs) if isinstance(first, float) else first


def _rows(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)


# --- warnings, as far as the change is detectable
# BatchNorm normalises over each micro-batch. Other buffers that a forward writes (the vectors of a spectral norm) are
# written once for each micro-batch. Some losses are not a mean over samples: they compare samples, as in CLIP, or
# divide by a number of tokens. Such a loss is not the mean of the micro-batches' losses.


_ONE = "microbatches=1 with schedule=gpipe is as in one process (one stage works at a time)"


def batch_norm_warning(module: nn.Module, number: int, size: int) -> str | None:
    """Returns a warning about BatchNorm layers in training mode; None without them, or with one micro-batch.

    Args:
        module: the module whose sub-modules are searched.
        number: number of micro-batches.
        size: samples of the batch.
    """
    names = [
        name for name, submodule in module.named_modules() if isinstance(submodule, _BatchNorm) and submodule.training
    ]
    if not names or number == 1:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the BatchNorm {names[0]!r}{more} normalises each micro-batch of {size // number} samples by itself in a"
        f" pipeline, not the {size} of the batch, and updates its statistics {number} times a batch: losses differ from"
        f" those of one process. {_ONE}; or take GroupNorm or LayerNorm, or call eval() on a BatchNorm whose statistics"
        " shall stay."
    )


def buffers_warning(module: nn.Module, written: Iterable[Key], number: int) -> str | None:
    """Returns a warning about buffers that a step writes, except those of BatchNorm; None without such buffers.

    Args:
        module: the module whose buffers they are.
        written: the attributes that a step writes.
        number: number of micro-batches.
    """
    parts = dict(module.named_modules())
    names = [
        ".".join(filter(None, (name, attribute)))
        for name, attribute in sorted(written)
        if attribute in parts[name]._buffers and not isinstance(parts[name], _BatchNorm)
    ]
    if not names or number == 1:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the step writes into the buffer {names[0]!r}{more} (as a spectral norm does), in a pipeline {number} times a"
        f" batch, once for each micro-batch: what depends on it differs from one process. {_ONE}; or choose another"
        " strategy, such as 'fsdp'."
    )


def loss_warning(stage: StageModule, step: Callable[[Any], Any], batch: Any, number: int) -> str | None:
    """Tests whether the loss of two micro-batches together is the mean of their losses.

    Runs the last stage four times without gradients and in eval mode, with random numbers in place of the activations
    that it would receive.

    Args:
        stage: the last stage, after a trial run.
        step: runs the module's step on a batch.
        batch: the whole batch.
        number: number of micro-batches.

    Returns:
        A warning; None if the loss is the mean, or if this can't be tested: the activations do not have one row for
        each sample, the step draws random numbers, or it fails with such activations.
    """
    width, job = batch_size_of(batch) // number, stage.partitioned.job
    assert job is not None
    sent = job.shapes.sent(stage.stage - 1) if stage.stage else []
    if number == 1 or not all(t.is_floating_point() and t.dim() and t.shape[0] == width for t in sent):
        return None
    if (results := _trial_losses(stage, step, batch, sent, width)) is None:
        return None
    again, *parts, (whole, _) = results
    if again != parts[0]:  # the step draws random numbers, such as noise
        return None
    mean = sum(loss * weight for loss, weight in parts) / (sum(weight for _, weight in parts) or 1.0)
    # In 16 bit, sums differ by more.
    if abs(whole - mean) <= (1e-3 if torch.float32 in {t.dtype for t in sent} else 3e-2) * abs(whole) + 1e-6:
        return None
    return (
        f"the loss of {2 * width} samples ({whole:.6g}, with random activations) is not the mean of that of two"
        f" micro-batches ({mean:.6g}), which is what a pipeline trains with: losses differ from those of one process."
        " If `training_step` divides by a number of tokens or the like, have it return {'loss': mean, 'weight':"
        f" number}}; if it compares the samples of a batch with each other, {_ONE}, or choose another strategy, such as"
        " 'fsdp'."
    )


def _trial_losses(
    stage: StageModule, step: Callable[[Any], Any], batch: Any, sent: Sequence[torch.Tensor], width: int
) -> list[tuple[float, float]] | None:
    """Returns loss and weight of the first micro-batch (twice), the second one, and both; None if the step fails."""
    partitioned, job = stage.partitioned, stage.partitioned.job
    assert job is not None
    numbers = [torch.randn((2 * width, *t.shape[1:]), dtype=torch.float32) for t in sent]
    modes, written = [(m, m.training) for m in partitioned.module.modules()], partitioned.written
    undo = ReachableState(partitioned.module).snapshot()
    results = []
    try:
        partitioned.written = None
        for module, _ in modes:
            module.training = False
        together, first, second = slice(0, 2 * width), slice(0, width), slice(width, 2 * width)
        for seed, rows in enumerate((first, first, second, together)):
            shapes = _of_size(job.shapes, width, rows.stop - rows.start)
            run = functools.partial(_run, step, take_rows(batch, rows))
            partitioned.job = dataclasses.replace(job, step=run, finish=_finish, shapes=shapes, is_trial=True)
            with torch.no_grad():
                received = (t[rows].to(partitioned.device, shape.dtype) for t, shape in zip(numbers, sent, strict=True))
                stage.micro_batch = seed
                results.append(_loss_and_weight(stage(*received)))
    except Exception:  # perhaps because of the random activations; the batch itself comes later
        return None
    finally:
        partitioned.job, partitioned.written, partitioned.failure = job, written, None
        partitioned.filled.clear()
        for module, mode in modes:
            module.training = mode
        undo()
    return results


def _run(step: Callable[[Any], Any], batch: Any, index: int) -> Any:
    return step(batch)


def _finish(index: int, output: Any) -> Any:
    return output


def _of_size(shapes: Shapes, width: int, size: int) -> Shapes:
    """Returns the shapes for micro-batches of `size` samples instead of `width`."""

    def resized(slot: TensorSlot) -> TensorSlot:
        return slot._replace(shape=(size, *slot.shape[1:])) if slot.shape[:1] == (width,) else slot

    units = {number: apply_to_collection(form, TensorSlot, resized) for number, form in shapes.units.items()}
    return dataclasses.replace(shapes, units=units)


def _loss_and_weight(output: Any) -> tuple[float, float]:
    if not isinstance(output, Mapping):
        return float(output), 1.0
    return float(output["loss"]), float(output.get("weight", 1.0))


# --- state that micro-batches leave behind
# **State that advances once a micro-batch.** What a micro-batch leaves behind, and the next one uses, advances several
# times a batch.
#
# In one process it advances once a batch. Examples are a number of calls, an average of activations, a memory of
# earlier inputs, whether it is kept on a block, in an object, by a class or as a global. What a micro-batch leaves
# behind and none reads (an auxiliary loss), or what is the same for all (a table of positions), is no such state. A
# stage runs micro-batches 0 and 1 in both orders, each time from the state at the beginning, forward and backward. For
# random values in place of what it would receive, it compares the state and the outputs of a micro-batch that came
# first with those of the same micro-batch that came second.
#
# **What a block writes where other stages do not see it**: into a list of its file, an attribute of a class, a variable
# of a function. `AttributeGuard` knows attributes of modules only.


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
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received[index]]
        output = stage(*inputs)
        _run_backward(output, [*inputs, *stage.partitioned.own_parameters.get(stage.stage, ())])
        stage.partitioned.filled.clear()
        # Which differ if the values of a stage's output do, but not by rounding in many layers.
        return [sums(tensor, rounding=1e-3) for tensor in tensors_in(output)], state.marks()

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


def _run_backward(output: Any, leaves: list[Tensor]) -> None:
    """Runs backward for what its code leaves behind: hooks of modules, and `torch.autograd.Function` of the user's."""
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_meta]
    if leaves and outputs:
        with suppress(Exception):  # with the batch's own values it may go well
            torch.autograd.grad(outputs, leaves, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)


def _different(a: dict[Place, Any], b: dict[Place, Any]) -> set[Place]:
    return {place for place in a.keys() | b.keys() if place not in a or place not in b or a[place] != b[place]}


def _random_of(shape: Tensor, device: torch.device) -> Tensor:
    values = zeros_of(shape, device)
    return values.detach().normal_().requires_grad_(shape.requires_grad) if shape.is_floating_point() else values
