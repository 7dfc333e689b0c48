"""Skips Lightning's functions between the loop and torch that only call the next one.

Between them are some 30 functions of the module, the strategy, the precision plugin and the wrapper of the optimizer.
If a class or an object overrides one of them, it is called. Lightning's own functions (and the engine's, for the
precision) only call the next one, so the loop calls the last one of such a chain directly.

If one of these methods is replaced during an epoch, on an object or on a class, the next batch uses the new one: at
each batch `is_current` compares what would be called.
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from lightning.pytorch.core.optimizer import do_nothing_closure
from torch import Tensor
from torch.optim import Optimizer

from .. import labels, strategies
from ..precision import plugins
from ..strategies import adapt
from ..strategies.before_use import close_then
from .averaged_gradients import AveragedGradients
from .hooks import Hooks

__all__ = ["BareStep", "Shortcuts", "zero_grad"]

_STRATEGY = "lightning.pytorch.strategies.strategy"
_DDP_STRATEGIES = ("lightning.pytorch.strategies.ddp", f"{strategies.__name__}.ddp")
"""Their hooks before backward are for manual optimization only, which does not run in the flat loop."""
_MODULE = "lightning.pytorch.core.module"
_OPTIMIZER = "lightning.pytorch.core.optimizer"
_PRECISION = "lightning.pytorch.plugins.precision.precision"
_FABRIC_PRECISION = "lightning.fabric.plugins.precision.precision"
_ENGINE_PRECISION = plugins.__name__

_CALLED = {
    "module": ("training_step", "optimizer_step", "optimizer_zero_grad"),
    "strategy": ("model", "training_step", "backward", "pre_backward", "post_backward", "optimizer_step"),
    "precision": (
        "train_step_context", "forward_context", "pre_backward", "backward", "post_backward", "optimizer_step",
        "_wrap_closure",
    ),
}  # fmt: skip
# Each in one call of Python's, since they are looked up at each batch.
_OF_HOOKS = attrgetter(*(f"{owner}.{name}" for owner, names in _CALLED.items() for name in names))
_OF_OPTIMIZER = attrgetter("step", "_on_before_step", "_on_after_step")


def _is_from(owner: Any, name: str, *modules: str) -> bool:
    """Whether a method of `owner` is code of one of `modules`, neither overridden nor wrapped."""
    function = getattr(getattr(owner, name, None), "__func__", None)
    # Compared by the module of its globals: `functools.wraps` copies the name and module of the wrapped function.
    return function is not None and function.__globals__["__name__"] in modules


class Shortcuts:
    """The calls of a step, each as short as possible without a visible difference.

    Args:
        hooks: hooks of the run, with its module, strategy and precision.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._of_hooks = _OF_HOOKS(hooks)
        self._of_optimizer = _OF_OPTIMIZER(hooks.strategy._lightning_optimizers[0])
        module, strategy, precision = hooks.module, hooks.strategy, hooks.precision
        wrapped = strategy._lightning_optimizers[0]
        self.skips_forward = (
            strategy.model is module
            and _is_from(strategy, "training_step", _STRATEGY)
            and _is_from(precision, "train_step_context", _ENGINE_PRECISION)
            and _is_from(precision, "forward_context", _FABRIC_PRECISION)
        )
        """Whether the strategy's `training_step` only calls the module's."""
        self._skips_backward = (
            _is_from(strategy, "backward", _STRATEGY)
            and _is_from(precision, "pre_backward", _ENGINE_PRECISION)
            and _is_from(precision, "backward", _PRECISION)
            and _is_from(precision, "post_backward", _ENGINE_PRECISION)
        )
        self._has_pre_backward = not _is_from(strategy, "pre_backward", _STRATEGY, *_DDP_STRATEGIES)
        self._has_post_backward = not _is_from(strategy, "post_backward", _STRATEGY, _DDP_STRATEGIES[0])
        self.skips_zero_grad = _is_from(module, "optimizer_zero_grad", _MODULE)
        """Whether gradients are zeroed by the optimizer alone, as Lightning does."""
        self._step_entry: Literal["module", "strategy", "precision"] = "module"
        # Lightning: LightningOptimizer.step calls these two first and last, for manual optimization.
        has_step_callbacks = {wrapped._on_before_step, wrapped._on_after_step} != {do_nothing_closure}
        if (
            _is_from(module, "optimizer_step", _MODULE)
            and _is_from(wrapped, "step", _OPTIMIZER)
            and not has_step_callbacks
        ):
            skips_strategy = _is_from(strategy, "optimizer_step", _STRATEGY) or adapt(strategy).passes_step_on
            self._step_entry = "precision" if skips_strategy else "strategy"
        self.calls_after_closure = (
            self._step_entry == "precision"
            and _is_from(precision, "optimizer_step", _PRECISION)
            and _is_from(precision, "_wrap_closure", _PRECISION)
        )
        """Whether the closure given to `optimizer_step` has to call the precision plugin's `_after_closure` itself."""
        self._step = BareStep(hooks.trainer.fit_loop.epoch_loop.averaged_gradients)

    def is_current(self) -> bool:
        """Whether the methods are still those that the shortcuts were derived from."""
        hooks = self._hooks
        wrapped = hooks.strategy._lightning_optimizers[0]
        return _OF_HOOKS(hooks) == self._of_hooks and _OF_OPTIMIZER(wrapped) == self._of_optimizer

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Runs backward and the hooks around it."""
        hooks = self._hooks
        if not self._skips_backward:
            hooks.strategy.backward(loss, optimizer)
            return
        # Lightning: Strategy.backward, and what it calls of the precision plugin
        if self._has_pre_backward:
            hooks.strategy.pre_backward(loss)
        hooks.call("on_before_backward", loss)
        hooks.module.backward(loss)
        hooks.call("on_after_backward")
        if self._has_post_backward:
            hooks.strategy.post_backward(loss)

    def zero_grad(self, batch_idx: int, optimizer: Any) -> None:
        """Zeroes the gradients."""
        hooks = self._hooks
        if self.skips_zero_grad:  # Lightning: LightningModule.optimizer_zero_grad
            hooks.in_hook("optimizer_zero_grad", zero_grad, optimizer)
        else:
            users, epoch = hooks.module.optimizer_zero_grad, hooks.trainer.current_epoch
            hooks.in_hook("optimizer_zero_grad", users, epoch, batch_idx, optimizer)

    def optimizer_step(self, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Runs the step of the strategy's first optimizer, which calls `closure`."""
        hooks = self._hooks
        # Lightning: LightningModule.optimizer_step, LightningOptimizer.step, Strategy.optimizer_step
        if self.calls_after_closure:  # Lightning: Precision.optimizer_step and ._wrap_closure as well
            hooks.in_hook("optimizer_step", self._step, optimizer, closure)
        elif self._step_entry == "precision":
            hooks.in_hook("optimizer_step", hooks.precision.optimizer_step, optimizer, hooks.module, closure)
        elif self._step_entry == "strategy":
            hooks.in_hook("optimizer_step", hooks.strategy.optimizer_step, optimizer, closure)
        else:
            step, epoch = hooks.module.optimizer_step, hooks.trainer.current_epoch
            wrapped = hooks.strategy._lightning_optimizers[0]
            hooks.in_hook("optimizer_step", step, epoch, batch_idx, wrapped, closure)


# --- an optimizer's step without torch's labels
# Calls an optimizer's `step` and `zero_grad` without torch's profiler labels while nothing records them: `labels.py`.
#
# Everything else that the two methods do still happens: the hooks of steps, the mark by which a scheduler knows that a
# step was taken, and the optimizer's own code. If `step` or `zero_grad` is not torch's, it is called as it is.


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
        self._is_scheduled = _is_wrapper_of(function, "torch.optim.lr_scheduler")
        if self._is_scheduled:
            function = function.__wrapped__
        if _is_wrapper_of(function, "torch.optim.optimizer"):
            self._own = function.__wrapped__


def _is_wrapper_of(function: Any, module: str) -> bool:
    # `functools.wraps` copies the name and module of the wrapped function, but not its globals and code.
    return getattr(function, "__globals__", {}).get("__name__") == module and function.__code__.co_name == "wrapper"
