"""Skips Lightning's functions between the loop and torch that only call the next one.

Between them are some 30 functions of the module, the strategy, the precision plugin and the wrapper of the optimizer.
If a class or an object overrides one of them, it is called. Lightning's own functions (and the engine's, for the
precision) only call the next one, so the loop calls the last one of such a chain directly.

If one of these methods is replaced during an epoch, on an object or on a class, the next batch uses the new one: at
each batch `is_current` compares what would be called.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from lightning.pytorch.core.optimizer import do_nothing_closure
from torch import Tensor

from .. import strategies
from ..precision import plugins
from ..strategies import adapt
from .hooks import Hooks

__all__ = ["Shortcuts"]

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
            hooks.in_hook("optimizer_zero_grad", optimizer.zero_grad)
        else:
            users, epoch = hooks.module.optimizer_zero_grad, hooks.trainer.current_epoch
            hooks.in_hook("optimizer_zero_grad", users, epoch, batch_idx, optimizer)

    def optimizer_step(self, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Runs the step of the strategy's first optimizer, which calls `closure`."""
        hooks = self._hooks
        # Lightning: LightningModule.optimizer_step, LightningOptimizer.step, Strategy.optimizer_step
        if self.calls_after_closure:  # Lightning: Precision.optimizer_step and ._wrap_closure as well
            hooks.in_hook("optimizer_step", optimizer.step, closure)
        elif self._step_entry == "precision":
            hooks.in_hook("optimizer_step", hooks.precision.optimizer_step, optimizer, hooks.module, closure)
        elif self._step_entry == "strategy":
            hooks.in_hook("optimizer_step", hooks.strategy.optimizer_step, optimizer, closure)
        else:
            step, epoch = hooks.module.optimizer_step, hooks.trainer.current_epoch
            wrapped = hooks.strategy._lightning_optimizers[0]
            hooks.in_hook("optimizer_step", step, epoch, batch_idx, wrapped, closure)
