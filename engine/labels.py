"""Torch's labels of code in a profile.

`record_function` opens and closes a label in Python even if nothing records it. This takes as long as four operations
on small tensors. A training step has four labels: those of the loader, of `DistributedDataParallel.forward`, of
`zero_grad` and of the optimizer's step. The engine leaves these out while nothing records labels.

Python can't detect an `ExecutionTraceObserver` that runs without a profiler, so its traces lack these four labels.
"""

from typing import Any

import torch
from torch.autograd import profiler
from torch.optim import optimizer

__all__ = ["are_recorded", "own_step_hooks"]

own_step_hooks: list[Any] = []
"""The engine's hooks on all optimizers' steps: they record nothing, and the engine calls them without the labels."""


def are_recorded() -> bool:
    """Whether a profiler records labels, or there are hooks on all optimizers' steps, which external profilers set."""
    return bool(
        profiler._is_profiler_enabled  # torch: those that Python has begun, in any thread
        or torch.autograd._profiler_enabled()  # torch: those of this thread
        or len(optimizer._global_optimizer_pre_hooks) > len(own_step_hooks)
        or optimizer._global_optimizer_post_hooks
    )
