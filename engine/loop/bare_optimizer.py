"""Calls an optimizer's `step` and `zero_grad` without torch's profiler labels while nothing records them: `labels.py`.

Everything else that the two methods do still happens: the hooks of steps, the mark by which a scheduler knows that a
step was taken, and the optimizer's own code. If `step` or `zero_grad` is not torch's, it is called as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .. import labels
from ..strategies.before_use import close_then
from .averaged_gradients import AveragedGradients

__all__ = ["BareStep", "zero_grad"]

_ZERO_GRAD = Optimizer.zero_grad if Optimizer.zero_grad.__globals__["__name__"].startswith("torch.") else None
"""torch's own function; a patch of the class, before or after this import, is another one."""


def zero_grad(optimizer: Any) -> None:
    """Sets the gradients to None."""
    if getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD or labels.are_recorded():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None  # not read before: reading it raises for parameters of other pipeline stages


class BareStep:
    """Calls the `step` of optimizers; inspects a `step` function only if it differs from that of the last call.

    Args:
        averaged_gradients: checks gradients by a hook on all optimizers' steps; None without such a check.
    """

    def __init__(self, averaged_gradients: AveragedGradients | None = None) -> None:
        self._averaged_gradients = averaged_gradients
        self._function: Any = None
        """The function that was last found as an optimizer's `step`."""
        self._own: Callable[..., Any] | None = None
        """The optimizer's own code inside of torch's wrapper; None if torch has not wrapped it."""
        self._is_scheduled = False
        """Whether a learning-rate scheduler has wrapped the function, to detect steps."""

    def __call__(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Runs the optimizer's step, which calls `closure`."""
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
        if self._averaged_gradients is not None:
            closure = functools.partial(close_then, self._averaged_gradients.check, optimizer, closure)
        self._own(optimizer, closure)

    def _look_into(self, function: Any) -> None:
        """Finds the optimizer's own code in `step`: torch has wrapped it, and a scheduler may have done so again."""
        self._function, self._own = function, None
        self._is_scheduled = _is_from(function, "torch.optim.lr_scheduler")
        if self._is_scheduled:
            function = function.__wrapped__
        if _is_from(function, "torch.optim.optimizer"):
            self._own = function.__wrapped__


def _is_from(function: Any, module: str) -> bool:
    # `functools.wraps` copies the name and module of the wrapped function, but not its globals and code.
    return getattr(function, "__globals__", {}).get("__name__") == module and function.__code__.co_name == "wrapper"
