"""Calls of the overridden hooks of callbacks and module.

Lightning calls each hook of each callback at each step, overridden or not, each in a profiler's context. Here only the
overridden ones are called. They are looked up at each call, as Lightning does: a callback may give itself or another
one a hook at any time. The order is Lightning's: the callbacks in their order, then the module.
"""

import types
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..phases import PhaseClock

__all__ = ["Hooks", "bound", "is_lightnings", "overridden"]


def bound(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """Returns `function` as a method of `owner`.

    A copied or pickled module gets such a method, instead of the replacement that a run has installed.
    """
    return types.MethodType(function, owner)


def overridden(owner: Any, base: type, name: str) -> Callable[..., Any] | None:
    """Returns the method `name` of `owner`; None if it is the one of `base`, which does nothing."""
    method = getattr(owner, name, None)
    function = getattr(method, "__func__", method)
    is_default = function is getattr(base, name) and is_lightnings(function)
    return method if callable(method) and not is_default else None


def is_lightnings(function: Any) -> bool:
    """Whether a function is Lightning's code, and not a patch of one of its classes."""
    # `functools.wraps` copies the name and module of the wrapped function, but not its globals.
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("lightning.")


def _defaults(base: type) -> dict[str, Any]:
    names = (name for name in dir(base) if name.startswith("on_") or "gradient" in name)
    return {name: function for name in names if is_lightnings(function := getattr(base, name))}


_OF_CALLBACK, _OF_MODULE = _defaults(Callback), _defaults(LightningModule)
"""The hooks that do nothing, by name: calls of them would take time without any effect."""
_CLIPS, _CLIPS_BY = _OF_MODULE.get("configure_gradient_clipping"), _OF_MODULE.get("clip_gradients")


class Hooks:
    """The overridden hooks of a trainer's callbacks and module."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.module: LightningModule = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.precision: Any = trainer.precision_plugin
        self._heartbeat: Any = trainer.heartbeat  # type: ignore[attr-defined]

    @property
    def clips(self) -> bool:
        """Whether the module overrides the clipping of gradients."""
        module = self.module
        return getattr(module.configure_gradient_clipping, "__func__", None) is not _CLIPS or (
            getattr(module.clip_gradients, "__func__", None) is not _CLIPS_BY
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls hook `name` of the callbacks, then of the module; returns the result of the module's."""
        # Lightning: LightningModule._current_fx_name is the hook that `self.log` is called from. It is set in
        # `__dict__`, because `nn.Module.__setattr__` takes longer than all the rest of this method.
        module = self.module
        state = module.__dict__
        outer = state["_current_fx_name"]
        state["_current_fx_name"] = name
        clock: PhaseClock | None = self._heartbeat.clock
        if clock is not None:
            result = self._call_timed(clock, name, arguments)
        else:
            default, result = _OF_CALLBACK.get(name), None
            # Not over a copy: Lightning, too, calls the hooks of callbacks that a hook adds.
            for callback in self.trainer.callbacks:
                hook = getattr(callback, name)
                if getattr(hook, "__func__", hook) is not default and callable(hook):
                    hook(self.trainer, module, *arguments)
            hook = getattr(module, name)
            if getattr(hook, "__func__", hook) is not _OF_MODULE.get(name) and callable(hook):
                result = hook(*arguments)
        state["_current_fx_name"] = outer
        return result

    def _call_timed(self, clock: PhaseClock, name: str, arguments: tuple[Any, ...]) -> Any:
        """Calls the hooks; the clock measures each of them as a separate activity."""
        trainer, module, default = self.trainer, self.module, _OF_CALLBACK.get(name)
        outer: str | None = None
        try:
            for callback in trainer.callbacks:
                hook = getattr(callback, name)
                if getattr(hook, "__func__", hook) is not default and callable(hook):
                    before = clock.enter(f"{type(callback).__name__}.{name}")
                    outer = outer or before
                    hook(trainer, module, *arguments)
            hook = getattr(module, name)
            if getattr(hook, "__func__", hook) is _OF_MODULE.get(name) or not callable(hook):
                return None
            before = clock.enter(f"{type(module).__name__}.{name}")
            outer = outer or before
            return hook(*arguments)
        finally:
            if outer is not None:
                clock.enter(outer)

    def in_hook(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `method`; meanwhile `self.log` acts as if it were called in the hook `name`."""
        state = self.module.__dict__
        outer = state["_current_fx_name"]
        state["_current_fx_name"] = name
        result = method(*arguments)
        state["_current_fx_name"] = outer
        return result
