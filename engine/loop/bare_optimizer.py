"""An optimizer's `step` and `zero_grad` without torch's labels in a profile, while nothing records them: `labels.py`.

All else that the two do is done here too: hooks of steps, a scheduler's note that there was a step, and the optimizer's
own code. An optimizer whose `step` or `zero_grad` is anything but torch's keeps it.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .. import labels

__all__ = ["BareOptimizer"]


def _is_from(function: Any, module: str) -> bool:
    # By where it was compiled: `functools.wraps` copies all other signs.
    return getattr(function, "__globals__", {}).get("__name__") == module and function.__code__.co_name == "wrapper"


class BareOptimizer:
    """Calls `step` and `zero_grad` of an optimizer.

    Args:
        optimizer: torch's or a user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._function: Any = None
        """The function that was last found as the optimizer's `step`."""
        self._step: Callable[..., Any] | None = None
        """The optimizer's own code in it; None if it is not as torch has it."""
        self._is_scheduled = False
        """Whether a scheduler has wrapped it, to know that there was a step."""

    def step(self, closure: Callable[[], Any]) -> None:
        """Steps; the optimizer calls `closure`."""
        optimizer: Any = self.optimizer
        method = optimizer.step
        function = getattr(method, "__func__", method)
        if function is not self._function:
            self._look_into(function)
        # torch: Optimizer.profile_hook_step calls the hooks of this optimizer, and those of all.
        has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if self._step is None or has_hooks or labels.are_recorded():
            method(closure)
            return
        if self._is_scheduled:
            optimizer._opt_called = True  # torch: schedulers check it for a step
        self._step(optimizer, closure)

    def zero_grad(self) -> None:
        """Sets the gradients to None."""
        optimizer = self.optimizer
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad or labels.are_recorded():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None

    def _look_into(self, function: Any) -> None:
        """Finds the optimizer's own code in `step`, which torch has wrapped, and a scheduler may have once more."""
        self._function, self._step = function, None
        self._is_scheduled = _is_from(function, "torch.optim.lr_scheduler")
        if self._is_scheduled:
            function = function.__wrapped__
        if _is_from(function, "torch.optim.optimizer"):
            self._step = function.__wrapped__
