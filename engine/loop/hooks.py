"""Calls of the overridden hooks of callbacks and module.

Lightning calls each hook of each callback at each step, overridden or not, each in a profiler's context. Here the
overridden hooks are looked up once, and a step calls only these. The order is Lightning's: the callbacks in their
order, then the module.
"""

import types
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..phases import PhaseClock

__all__ = ["Hooks", "bound", "overridden"]

_CLIPPING = ("configure_gradient_clipping", "clip_gradients")
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def bound(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """Returns `function` as a method of `owner`.

    A copied or pickled module gets such a method, instead of the replacement that a run has installed.
    """
    return types.MethodType(function, owner)


def overridden(owner: Any, base: type, name: str) -> Callable[..., Any] | None:
    """Returns the method `name` of `owner`; None if it is the one of `base`, which does nothing."""
    method = getattr(owner, name, None)
    return method if callable(method) and getattr(method, "__func__", method) is not getattr(base, name) else None


class Hooks:
    """The overridden hooks of a trainer's callbacks and module."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.module: LightningModule = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.precision: Any = trainer.precision_plugin
        self.refresh()

    def refresh(self) -> None:
        """Looks the hooks up again, since callbacks or an object have changed."""
        self._callbacks = list(self.trainer.callbacks)
        # Lightning: its wrappers of the optimizers
        owners = (self.module, self.strategy, self.precision, *self.strategy._lightning_optimizers)
        self._states = [vars(owner) for owner in owners]
        self._num_attributes = list(map(len, self._states))
        self._by_name: dict[str, tuple[list[Callable[..., Any]], Callable[..., Any] | None]] = {}
        self._heartbeat: Any = self.trainer.heartbeat
        self._activities: dict[str, list[str]] = {}
        self.present = frozenset(name for name in _STEP_HOOKS if any(self._look_up(name)))
        """The overridden hooks of a training step; calls of the others would take time without any effect."""
        self.clips = any(overridden(self.module, LightningModule, name) for name in _CLIPPING)
        """Whether the module overrides the clipping of gradients."""

    def is_stale(self) -> bool:
        """Whether the list of callbacks, or the number of an object's attributes, has changed since `refresh`.

        The objects are the module, the strategy, the precision plugin and the optimizers: an attribute may be a method.
        """
        return self.trainer.callbacks != self._callbacks or list(map(len, self._states)) != self._num_attributes

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls hook `name` of the callbacks, then of the module; returns the result of the module's."""
        overridden_hooks = self._by_name.get(name)
        if overridden_hooks is None:
            overridden_hooks = self._look_up(name)
        callback_hooks, module_hook = overridden_hooks
        if not callback_hooks and module_hook is None:
            return None
        # Lightning: LightningModule._current_fx_name is the hook that `self.log` is called from. It is set in
        # `__dict__`, because `nn.Module.__setattr__` takes longer than all the rest of this method.
        state = self.module.__dict__
        outer = state["_current_fx_name"]
        state["_current_fx_name"] = name
        clock: PhaseClock | None = self._heartbeat.clock
        if clock is not None:
            result = self._call_timed(clock, overridden_hooks, self._activities[name], *arguments)
        else:
            for hook in callback_hooks:
                hook(self.trainer, self.module, *arguments)
            result = module_hook(*arguments) if module_hook is not None else None
        state["_current_fx_name"] = outer
        return result

    def _look_up(self, name: str) -> tuple[list[Callable[..., Any]], Callable[..., Any] | None]:
        hooks = [(c, hook) for c in self._callbacks if (hook := overridden(c, Callback, name))]
        owners = [*(callback for callback, _ in hooks), self.module]
        self._activities[name] = [f"{type(owner).__name__}.{name}" for owner in owners]
        self._by_name[name] = [hook for _, hook in hooks], overridden(self.module, LightningModule, name)
        return self._by_name[name]

    def _call_timed(
        self,
        clock: PhaseClock,
        hooks: tuple[list[Callable[..., Any]], Callable[..., Any] | None],
        activities: list[str],
        *arguments: Any,
    ) -> Any:
        """Calls the hooks; the clock measures each of them as a separate activity."""
        callback_hooks, module_hook = hooks
        trainer, module, enter = self.trainer, self.module, clock.enter
        outer = enter(activities[0])
        try:
            for number, hook in enumerate(callback_hooks):
                if number:
                    enter(activities[number])
                hook(trainer, module, *arguments)
            if module_hook is None:
                return None
            if callback_hooks:
                enter(activities[-1])
            return module_hook(*arguments)
        finally:
            enter(outer)

    def in_hook(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `method`; meanwhile `self.log` acts as if it were called in the hook `name`."""
        state = self.module.__dict__
        outer = state["_current_fx_name"]
        state["_current_fx_name"] = name
        result = method(*arguments)
        state["_current_fx_name"] = outer
        return result
