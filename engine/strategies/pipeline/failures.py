"""Describes errors of the user's step: where they happened, and what a pipeline changes for the step."""

import traceback

import torch

from .remote_values import CutError, is_of_program

__all__ = ["describe_failure"]


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
