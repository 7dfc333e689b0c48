"""Warnings of modules for which a batch in micro-batches is not what it is in one piece, as far as can be found out.

BatchNorm normalises by the samples that it sees at a time. What else a forward writes into a buffer (the vectors of a
spectral norm) is written for each micro-batch. And a loss that is no mean over the samples (it compares
them with each other, as in CLIP, or divides by a number of tokens) is not the mean of its micro-batches' losses.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...loop.undo import Undo
from .batches import batch_size_of, rows_of
from .notes import Key
from .part import Part
from .shapes import Shapes
from .share import Place

__all__ = ["batch_norm_text", "buffers_text", "loss_text"]

_ONE = "microbatches=1 with schedule=gpipe is as in one process (one stage works at a time)"


def batch_norm_text(module: nn.Module, number: int, size: int) -> str | None:
    """A warning of BatchNorm that is trained; None if there is none, or but one micro-batch.

    Args:
        module: whose parts are looked at.
        number: of micro-batches.
        size: samples of the batch.
    """
    names = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    if not names or number == 1:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the BatchNorm {names[0]!r}{more} normalises each micro-batch of {size // number} samples by itself in a"
        f" pipeline, not the {size} of the batch, and updates its statistics {number} times a batch: losses differ from"
        f" those of one process. {_ONE}; or take GroupNorm or LayerNorm, or call eval() on a BatchNorm whose statistics"
        " shall stay."
    )


def buffers_text(module: nn.Module, written: Iterable[Key], number: int) -> str | None:
    """A warning of buffers that a step writes, those of BatchNorm aside; None if there are none.

    Args:
        module: whose buffers they are.
        written: what a step writes.
        number: of micro-batches.
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


def loss_text(part: Part, step: Callable[[Any], Any], batch: Any, number: int) -> str | None:
    """Tries out whether the loss of two micro-batches at once is the mean of theirs.

    Runs the last stage four times without gradients and in eval mode, with random numbers in the place of what it
    would receive.

    Args:
        part: the last stage, after a trial run.
        step: of the module, given a batch.
        batch: the whole one.
        number: of micro-batches.

    Returns:
        A warning; None if it is so, or if that can't be tried out: what the stage receives has not one row for each
        sample, the step draws random numbers, or it fails with such activations.
    """
    cut, job, width = part.cut, part.cut.job, batch_size_of(batch) // number
    assert job is not None
    sent = job.shapes.sent(part.stage - 1)
    if number == 1 or not all(t.is_floating_point() and t.dim() and t.shape[0] == width for t in sent):
        return None
    numbers = [torch.randn((2 * width, *t.shape[1:]), dtype=torch.float32) for t in sent]
    modes, written, undo = [(m, m.training) for m in cut.module.modules()], cut.written, Undo(cut.module, random=False)
    found = []
    try:
        cut.written = None
        for module, _ in modes:
            module.training = False
        both, first, second = slice(0, 2 * width), slice(0, width), slice(width, 2 * width)
        for seed, rows in enumerate((first, first, second, both)):
            shapes = _of_size(job.shapes, width, rows.stop - rows.start)
            run = functools.partial(_run, step, rows_of(batch, rows))
            cut.job = dataclasses.replace(job, step=run, finish=_finish, shapes=shapes)
            with torch.no_grad():
                received = (t[rows].to(cut.device, shape.dtype) for t, shape in zip(numbers, sent, strict=True))
                found.append(_loss_and_weight(part(*received, index=torch.tensor([seed]))))
    except Exception:  # it may be the numbers; the batch itself is yet to come
        return None
    finally:
        cut.job, cut.written, cut.failure = job, written, None
        cut.filled.clear()
        for module, mode in modes:
            module.training = mode
        undo.undo()
    again, *parts, (whole, _) = found
    if again != parts[0]:  # the step draws random numbers, such as noise
        return None
    mean = sum(loss * weight for loss, weight in parts) / (sum(weight for _, weight in parts) or 1.0)
    # Sums in 16 bit differ by more than that.
    if abs(whole - mean) <= (1e-3 if torch.float32 in {t.dtype for t in sent} else 3e-2) * abs(whole) + 1e-6:
        return None
    return (
        f"the loss of {2 * width} samples ({whole:.6g}, with random activations) is not the mean of that of two"
        f" micro-batches ({mean:.6g}), which is what a pipeline trains with: losses differ from those of one process."
        " If `training_step` divides by a number of tokens or the like, have it return {'loss': mean, 'weight':"
        f" number}}; if it compares the samples of a batch with each other, {_ONE}, or choose another strategy, such as"
        " 'fsdp'."
    )


def _run(step: Callable[[Any], Any], batch: Any, index: int) -> Any:
    return step(batch)


def _finish(index: int, output: Any) -> Any:
    return output


def _of_size(shapes: Shapes, width: int, size: int) -> Shapes:
    """Those of micro-batches of `size` samples, not `width`."""

    def resized(place: Place) -> Place:
        return place._replace(shape=(size, *place.shape[1:])) if place.shape[:1] == (width,) else place

    units = {number: apply_to_collection(form, Place, resized) for number, form in shapes.units.items()}
    return dataclasses.replace(shapes, units=units)


def _loss_and_weight(output: Any) -> tuple[float, float]:
    if not isinstance(output, Mapping):
        return float(output), 1.0
    return float(output["loss"]), float(output.get("weight", 1.0))
