"""Calls of the overridden hooks of callbacks and module.

Lightning calls each hook of each callback at each step, overridden or not, each in a profiler's context. Here only the
overridden ones are called, unless there is a profiler, whose user expects the names of all of them. They are looked up
at each call, as Lightning does: a callback may give itself or another one a hook at any time. The order is Lightning's:
the callbacks in their order, then the module.
"""

import functools
import types
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from ..devices import module_of
from ..phases import PhaseClock
from ..precision import plugins

__all__ = ["Hooks", "Shortcuts", "Transfer", "bound", "is_lightnings", "is_profiled", "is_stock", "overridden"]


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


def is_stock(callback: Any) -> bool:
    """Whether a callback is one of Lightning's or of this package, which write into no weight between the passes."""
    return type(callback).__module__.startswith(("lightning.", "polyphase."))


def is_profiled(trainer: Any) -> bool:
    """Whether a profiler of the user's times the actions of a run, by the names that Lightning gives them."""
    return not isinstance(trainer.profiler, PassThroughProfiler)


def _defaults(base: type) -> dict[str, Any]:
    names = (name for name in dir(base) if name.startswith("on_") or "gradient" in name)
    return {name: function for name in names if is_lightnings(function := getattr(base, name))}


_OF_CALLBACK, _OF_MODULE = _defaults(Callback), _defaults(LightningModule)
"""The hooks that do nothing, by name: calls of them would take time without any effect."""
_CLIPS, _CLIPS_BY = _OF_MODULE.get("configure_gradient_clipping"), _OF_MODULE.get("clip_gradients")


class Hooks:
    """The overridden hooks of a trainer's callbacks and module; with a profiler all of them, which Lightning calls."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.is_profiled = is_profiled(trainer)
        self.module: LightningModule = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.precision: Any = trainer.precision_plugin
        self._heartbeat: Any = trainer.heartbeat  # type: ignore[attr-defined]

    @property
    def clips(self) -> bool:
        """Whether the clipping of gradients is called without a limit, too: the module overrides it, or it is timed."""
        module = self.module
        return (
            self.is_profiled
            or getattr(module.configure_gradient_clipping, "__func__", None) is not _CLIPS
            or getattr(module.clip_gradients, "__func__", None) is not _CLIPS_BY
        )

    def has_users(self, name: str) -> bool:
        """Whether a callback of the user's, or the module, overrides hook `name`."""
        own = (callback for callback in self.trainer.callbacks if not is_stock(callback))
        of_callbacks = (overridden(callback, Callback, name) for callback in own)
        return overridden(self.module, LightningModule, name) is not None or any(of_callbacks)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls hook `name` of the callbacks, then of the module; returns the result of the module's."""
        if self.is_profiled:
            call._call_callback_hooks(self.trainer, name, *arguments)
            return call._call_lightning_module_hook(self.trainer, name, *arguments)
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


# Moves a batch to the device, through the hooks that a user has overridden.
#
# On an accelerator plain tensors are copied on a separate stream. A batch is fetched while the device still computes
# the previous one, so the copy overlaps with this computation. If memory is not pinned, the process waits for the
# copy; on the compute stream it would also wait for all earlier computation.

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Lightning's chain of hooks; a batch of plain tensors skips it if nobody has overridden or times a hook."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._owners = SimpleNamespace(
            module=trainer.lightning_module, data=data, strategy=trainer.strategy, precision=trainer.precision_plugin
        )
        owners_of_hooks = ["module"] if data is None else ["module", "data"]
        self._look_up = attrgetter(
            *(f"{owner}.{name}" for owner in owners_of_hooks for name in _HOOKS),
            "strategy.batch_to_device",
            "precision.convert_input",
        )
        self._calls = self._look_up(self._owners)
        candidates: list[tuple[Any, type, str]] = [
            *((trainer.lightning_module, LightningModule, name) for name in _HOOKS),
            *((data, LightningDataModule, name) for name in _HOOKS if data is not None),
            (trainer.strategy, Strategy, "batch_to_device"),
            (trainer.precision_plugin, Precision, "convert_input"),
        ]
        of_users = {name for owner, base, name in candidates if overridden(owner, base, name)}
        self._is_plain = not of_users and not is_profiled(trainer)
        moves_itself = not of_users.isdisjoint({"transfer_batch_to_device", "batch_to_device"})
        self._stream = None if moves_itself else _stream(self._device)

    def is_current(self) -> bool:
        """Whether the hooks are still those that this object was made for: any object or class may get another one."""
        return self._look_up(self._owners) == self._calls

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Returns the batch on the device."""
        if self.is_there(batch):
            return batch
        trainer = self._trainer
        # Lightning: LightningModule._on_before_batch_transfer and Strategy.batch_to_device call the three hooks.
        if not self._is_plain:
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        if self._stream is not None:
            batch = self._copy(batch)
            if self.is_there(batch):
                return batch
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)

    def is_there(self, batch: Any) -> bool:
        """Whether there is nothing to do: plain tensors that are on the device already, and no hook."""
        if not self._is_plain:
            return False
        kind = type(batch)
        items = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
        # Exactly Tensor: other types may have their own `to` method. (A loop takes half the time of `all`.)
        for item in items:  # noqa: SIM110
            if type(item) is not Tensor or item.device != self._device:
                return False
        return True

    def _copy(self, batch: Any) -> Any:
        """Returns the batch with its plain tensors on the device; the hooks handle all other values."""
        module = module_of(self._device)
        copies: list[Tensor] = []
        with module.stream(self._stream):
            batch = _copied(batch, self._device, copies)
        compute_stream = module.current_stream(self._device)
        compute_stream.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(compute_stream)  # otherwise its memory would go back to the copying stream too early
        return batch


def _copied(item: Any, device: torch.device, copies: list[Tensor]) -> Any:
    """Returns a part of a batch on the device, and adds its tensors to `copies`."""
    # No nested function: one that calls itself is a reference cycle, and keeps the batch until garbage is collected.
    kind = type(item)
    if kind is Tensor and item.device.type == "cpu" and item.layout is torch.strided and not item.requires_grad:
        copies.append(item.to(device, non_blocking=True))
        return copies[-1]
    if kind is dict:
        return {key: _copied(value, device, copies) for key, value in item.items()}
    if kind is list or kind is tuple:
        return kind(map(functools.partial(_copied, device=device, copies=copies), item))
    return item


@functools.cache
def _stream(device: torch.device) -> Any:
    """Returns the stream of copies to a device; None without streams. All loops share it, and its copies' memory."""
    module = module_of(device)
    return module.Stream(device=device) if hasattr(module, "Stream") else None


# Skips Lightning's functions between the loop and torch that only call the next one.
#
# Between them are some 30 functions of the module, the strategy, the precision plugin and the wrapper of the optimizer.
# If a class or an object overrides one of them, it is called. Lightning's own functions (and the engine's, for the
# precision) only call the next one, so the loop calls the last one of such a chain directly.
#
# If one of these methods is replaced during an epoch, on an object or on a class, the next batch uses the new one: at
# each batch `is_current` compares what would be called.

_STRATEGY = "lightning.pytorch.strategies.strategy"
_DDP_STRATEGIES = ("lightning.pytorch.strategies.ddp", f"{__name__.removesuffix('loop.hooks')}strategies.ddp")
"""Their hooks before backward are for manual optimization only, which does not come here."""
_MODULE = "lightning.pytorch.core.module"
_OPTIMIZER = "lightning.pytorch.core.optimizer"
_PRECISION = "lightning.pytorch.plugins.precision.precision"
_FABRIC_PRECISION = "lightning.fabric.plugins.precision.precision"
# Those of `loss_scaling.py` do more than call the next one, which is why they stand in another file.
_ENGINE_PRECISION = plugins.__name__

_CALLED = {
    "module": ("training_step", "optimizer_step", "optimizer_zero_grad"),
    "strategy": (
        "model", "training_step", "post_training_step", "backward", "pre_backward", "post_backward", "optimizer_step",
    ),
    "precision": (
        "train_step_context", "forward_context", "pre_backward", "backward", "post_backward", "optimizer_step",
        "_wrap_closure",
    ),
}  # fmt: skip
# Each in one call of Python's, since they are looked up at each batch.
_OF_HOOKS = attrgetter(*(f"{owner}.{name}" for owner, names in _CALLED.items() for name in names))
_OF_OPTIMIZER = attrgetter("step", "_on_before_step", "_on_after_step")


_PASSING_ON: Mapping[str, Collection[str]] = {
    "module.optimizer_step": (_MODULE,),
    "module.optimizer_zero_grad": (_MODULE,),
    "optimizer.step": (_OPTIMIZER,),
    "strategy.training_step": (_STRATEGY,),
    "strategy.post_training_step": (_STRATEGY,),
    "strategy.pre_backward": (_STRATEGY, *_DDP_STRATEGIES),
    "strategy.backward": (_STRATEGY,),
    "strategy.post_backward": (_STRATEGY, _DDP_STRATEGIES[0]),
    "strategy.optimizer_step": (_STRATEGY,),
    "precision.train_step_context": (_ENGINE_PRECISION,),
    "precision.forward_context": (_FABRIC_PRECISION,),
    "precision.pre_backward": (_ENGINE_PRECISION,),
    "precision.backward": (_PRECISION,),
    "precision.post_backward": (_ENGINE_PRECISION,),
    "precision.optimizer_step": (_PRECISION,),
    "precision._wrap_closure": (_PRECISION,),
}
"""The modules whose code of a method does nothing but call the next one of its chain."""
_FORWARD = {
    "strategy.training_step", "strategy.post_training_step", "precision.train_step_context",
    "precision.forward_context",
}  # fmt: skip
_BACKWARD = {"strategy.backward", "precision.pre_backward", "precision.backward", "precision.post_backward"}


def _passes_on(method: Any, modules: Collection[str]) -> bool:
    """Whether a method is code of one of `modules`, neither overridden nor wrapped."""
    function = getattr(method, "__func__", None)
    # Compared by the module of its globals: `functools.wraps` copies the name and module of the wrapped function.
    return function is not None and function.__globals__["__name__"] in modules


class Shortcuts:
    """The calls of a step, each as short as possible without a visible difference; with a profiler, Lightning's chains.

    Args:
        trainer: the trainer of the run, when it has its optimizers.

    Attributes:
        hooks: the hooks of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.hooks = hooks = Hooks(trainer)
        self._of_hooks = _OF_HOOKS(hooks)
        self._of_optimizer = _OF_OPTIMIZER(hooks.strategy._lightning_optimizers[0])
        strategy, wrapped = hooks.strategy, hooks.strategy._lightning_optimizers[0]
        owners = SimpleNamespace(module=hooks.module, optimizer=wrapped, strategy=strategy, precision=hooks.precision)
        passing = {name for name, homes in _PASSING_ON.items() if _passes_on(attrgetter(name)(owners), homes)}
        if hooks.is_profiled:
            passing.clear()
        # Whether the strategy's `training_step` only calls the module's.
        self._skips_forward = strategy.model is hooks.module and passing >= _FORWARD
        self._skips_backward = passing >= _BACKWARD
        self._has_pre_backward = "strategy.pre_backward" not in passing
        self._has_post_backward = "strategy.post_backward" not in passing
        self.skips_zero_grad = "module.optimizer_zero_grad" in passing
        """Whether gradients are zeroed by the optimizer alone, as Lightning does."""
        self._step_entry: Literal["module", "strategy", "precision"] = "module"
        # Lightning: LightningOptimizer.step calls these two first and last, for manual optimization.
        has_step_callbacks = {wrapped._on_before_step, wrapped._on_after_step} != {do_nothing_closure}
        if passing >= {"module.optimizer_step", "optimizer.step"} and not has_step_callbacks:
            skips_strategy = "strategy.optimizer_step" in passing or hooks.trainer.engine_strategy.passes_step_on
            self._step_entry = "precision" if skips_strategy else "strategy"
        # A strategy that accumulates gradients itself steps after each micro-batch, not only at the end of a window.
        self.calls_after_closure = (
            self._step_entry == "precision"
            and not strategy.handles_gradient_accumulation
            and passing >= {"precision.optimizer_step", "precision._wrap_closure"}
        )
        """Whether the closure given to `optimizer_step` has to call the precision plugin's `_after_closure` itself."""

    def is_current(self) -> bool:
        """Whether the methods are still those that the shortcuts were derived from."""
        hooks = self.hooks
        wrapped = hooks.strategy._lightning_optimizers[0]
        return _OF_HOOKS(hooks) == self._of_hooks and _OF_OPTIMIZER(wrapped) == self._of_optimizer

    def training_step(self, *arguments: Any) -> Any:
        """Runs `training_step`, and returns its output."""
        hooks = self.hooks
        if self._skips_forward:
            return hooks.in_hook("training_step", hooks.module.training_step, *arguments)
        output = call._call_strategy_hook(hooks.trainer, "training_step", *arguments)
        hooks.strategy.post_training_step()
        return output

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Runs backward and the hooks around it; called within the hook "backward"."""
        hooks = self.hooks
        if not self._skips_backward:
            call._call_strategy_hook(hooks.trainer, "backward", loss, optimizer)
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
        hooks = self.hooks
        if self.skips_zero_grad:  # Lightning: LightningModule.optimizer_zero_grad
            hooks.in_hook("optimizer_zero_grad", optimizer.zero_grad)
        else:
            epoch = hooks.trainer.current_epoch
            call._call_lightning_module_hook(hooks.trainer, "optimizer_zero_grad", epoch, batch_idx, optimizer)

    def optimizer_step(self, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Runs the step of the strategy's first optimizer, which calls `closure`."""
        hooks = self.hooks
        # Lightning: LightningModule.optimizer_step, LightningOptimizer.step, Strategy.optimizer_step
        if self.calls_after_closure:  # Lightning: Precision.optimizer_step and ._wrap_closure as well
            hooks.in_hook("optimizer_step", optimizer.step, closure)
        elif self._step_entry == "precision":
            hooks.in_hook("optimizer_step", hooks.precision.optimizer_step, optimizer, hooks.module, closure)
        elif self._step_entry == "strategy":
            hooks.in_hook("optimizer_step", hooks.strategy.optimizer_step, optimizer, closure)
        else:
            arguments = hooks.trainer.current_epoch, batch_idx, hooks.strategy._lightning_optimizers[0], closure
            call._call_lightning_module_hook(hooks.trainer, "optimizer_step", *arguments)
