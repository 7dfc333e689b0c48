"""Warnings for modules whose result changes when a batch is cut into micro-batches, as far as this is detectable.

BatchNorm normalises over each micro-batch. Other buffers that a forward writes (the vectors of a spectral norm) are
written once for each micro-batch. Some losses are not a mean over samples: they compare samples, as in CLIP, or
divide by a number of tokens. Such a loss is not the mean of the micro-batches' losses.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from ..._compat.torch import _BatchNorm
from .attribute_writes import Key
from .batches import batch_size_of, take_rows
from .reachable_state import ReachableState
from .shapes import Shapes
from .stage_module import StageModule
from .tree_broadcast import TensorSlot

__all__ = ["batch_norm_warning", "buffers_warning", "loss_warning"]

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
        f"{name}.{attribute}"
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
