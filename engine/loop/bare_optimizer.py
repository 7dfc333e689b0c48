"""An optimizer's `step` and `zero_grad` without torch's labels in a profile, while nothing records them: `labels.py`.

All else that the two do is done here too: hooks of steps, a scheduler's note that there was a step, and the optimizer's
own code. An optimizer whose `step` or `zero_grad` is anything but torch's keeps it.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .. import labels

__all__ = ["BareStep", "zero_grad"]


def zero_grad(optimizer: Any) -> None:
    """Sets the gradients to None."""
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad or labels.are_recorded():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None  # without a look: what a pipeline's stage does not have refuses to show its gradient


class BareStep:
    """Calls `step` of optimizers; it looks into the function that it last found there once."""

    def __init__(self) -> None:
        self._function: Any = None
        """The function that was last found as an optimizer's `step`."""
        self._own: Callable[..., Any] | None = None
        """The optimizer's own code in it; None if it is not as torch has it."""
        self._is_scheduled = False
        """Whether a scheduler has wrapped it, to know that there was a step."""

    def __call__(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Steps; the optimizer calls `closure`."""
        step = optimizer.step
        function = getattr(step, "__func__", step)
        if function is not self._function:
            self._look_into(function)
        # torch: Optimizer.profile_hook_step calls the hooks of this optimizer, and those of all.
        if (
            self._own is None
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or labels.are_recorded()
        ):
            step(closure)
            return
        if self._is_scheduled:
            optimizer._opt_called = True  # torch: schedulers check it for a step
        self._own(optimizer, closure)

    def _look_into(self, function: Any) -> None:
        """Finds the optimizer's own code in `step`, which torch has wrapped, and a scheduler may have once more."""
        self._function, self._own = function, None
        self._is_scheduled = _is_from(function, "torch.optim.lr_scheduler")
        if self._is_scheduled:
            function = function.__wrapped__
        if _is_from(function, "torch.optim.optimizer"):
            self._own = function.__wrapped__


def _is_from(function: Any, module: str) -> bool:
    # By where it was compiled: `functools.wraps` copies all other signs.
    return getattr(function, "__globals__", {}).get("__name__") == module and function.__code__.co_name == "wrapper"
