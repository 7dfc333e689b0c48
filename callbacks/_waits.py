"""Announces to a clock what loop and strategy do not announce: collectives, the end of backward, hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch: tensors of a mesh wait with this function when their values are needed.
from polyphase.engine._compat.torch import _functional_collectives as functional
from polyphase.engine.phases import PhaseClock, counts_as_communication, listening, phase_of_action, phase_of_activity

__all__ = ["actions_of", "collectives", "mark_end_of_backward"]


@contextmanager
def collectives(clock: PhaseClock) -> Iterator[None]:
    """Announces to `clock` each wait for a collective that is called from Python.

    The waits of DistributedDataParallel are not called from Python: see `mark_end_of_backward`.
    """
    wait, wait_tensor = dist.Work.wait, functional.wait_tensor
    timed = counts_as_communication(wait_tensor)

    def timed_wait_tensor(tensor: Tensor) -> Tensor:
        return wait_tensor(tensor) if torch.compiler.is_compiling() else timed(tensor)

    dist.Work.wait, functional.wait_tensor = counts_as_communication(wait), timed_wait_tensor  # type: ignore[method-assign]
    try:
        with listening(clock):
            yield
    finally:
        dist.Work.wait, functional.wait_tensor = wait, wait_tensor  # type: ignore[method-assign]


def mark_end_of_backward(loss: Tensor, clock: PhaseClock) -> None:
    """Announces to `clock` the waits between the last gradient of `loss` and the end of backward.

    Callbacks at the end of backward run in the order of their registration. DistributedDataParallel and FSDP2 register
    theirs when they see a gradient. A callback that is registered at the beginning of backward runs before these. A
    callback that it registers when it runs comes after them.
    """
    # torch: DistributedDataParallel and FSDP2 register their last work of a backward here.
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def begin(_: Tensor) -> None:
        queue(end_of_gradients)

    def end_of_gradients() -> None:
        outer = clock.enter("communication")

        def end_of_waits() -> None:
            clock.enter(outer)

        queue(end_of_waits)

    loss.register_hook(begin)


@contextmanager
def actions_of(profiler: Any, clock: PhaseClock) -> Iterator[None]:
    """Announces Lightning's actions for `profiler` to `clock`: hooks at the ends of epochs, and its own loop."""
    start, stop = profiler.start, profiler.stop
    under_way: list[tuple[str, str]] = []

    def timed_start(action: str) -> None:
        start(action)
        phase = phase_of_action(action)
        if phase is not None:
            under_way.append((action, clock.enter(_hook(action) if phase == "callbacks" else phase)))

    def timed_stop(action: str) -> None:
        if under_way and under_way[-1][0] == action:
            _, outer = under_way.pop()
            # Lightning's own loop announces the end of a fetch, but not what follows, which is not the user's code.
            between = not under_way and phase_of_activity(outer) == "compute"
            clock.enter("engine" if between else outer)
        stop(action)

    profiler.start, profiler.stop = timed_start, timed_stop
    try:
        yield
    finally:
        del profiler.start, profiler.stop


def _hook(action: str) -> str:
    """``"[Callback]EarlyStopping{'monitor': 'x'}.on_train_end"`` -> ``"EarlyStopping.on_train_end"``."""
    owner, _, name = action.rpartition(".")
    return f"{owner.partition(']')[2].partition('{')[0]}.{name}"
