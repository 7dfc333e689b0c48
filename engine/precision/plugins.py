"""Precision plugins, the same under every strategy and on every device.

They are Lightning's plugins, with two differences. `clipping.py` clips gradients: it supports sharded ones,
and keeps the norm. `16-mixed` also uses float16 on the CPU (where Lightning silently uses bfloat16) and under FSDP2
(where Lightning refuses it). GradScaler's check for infinities has the same result on all ranks: averaged gradients
carry an infinity to all of them, and for sharded gradients torch reduces the result over the mesh.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import precision as lightnings
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from . import OF_BLOCKS, PRECISIONS, canonical_precision
from .clipping import clip_by_norm, clip_by_value
from .loss_scaling import LossScaler, Parameters, ScaledPrecision, one_update

__all__ = [
    "PRECISIONS",
    "autocast_dtype",
    "can_step_together",
    "canonical_precision",
    "make_precision",
    "stepping_together",
]


class _Clipping(Precision):
    """Clips whole and sharded gradients alike; `grad_norm` is the last norm before clipping, a 0-d tensor."""

    grad_norm: Tensor | None = None
    norm_of: Callable[[Iterable[Tensor]], Tensor] | None = None
    """The strategy's function for the norm, if ranks have gradients of different parameters; otherwise None."""
    clipper: Callable[[str, float], None] | None = None
    """Called with "norm" or "value" and the limit, if another object clips; None: this plugin clips."""
    before_clipping: Callable[[Any], Any] | None = None
    """Called with an optimizer whose gradients are about to be clipped: an infinite value may be finite afterwards."""

    # Lightning: Precision.train_step_context and .val_step_context do the same by way of a generator.
    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.forward_context()

    def val_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.forward_context()

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.clipper is not None:
            self.clipper("norm", clip_val)
            return
        if self.before_clipping is not None:
            self.before_clipping(optimizer)
        self.grad_norm = clip_by_norm(self.main_params(optimizer), clip_val, self.norm_of)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.clipper is not None:
            self.clipper("value", clip_val)
            return
        if self.before_clipping is not None:
            self.before_clipping(optimizer)
        clip_by_value(self.main_params(optimizer), clip_val)


class _Hooked(Precision):
    """Calls the hooks around backward and step through `hooks`, if a loop has set it.

    It is the last base of a class: the other bases change the loss or the gradients around it.
    """

    hooks: Any = None
    """The hooks of the loop, see `engine/loop/hooks.py`; None: Lightning calls the hooks."""
    together: list[Optimizer] | None = None
    """The optimizers of a step of several, until their gradients are ready for it; then none. None: one by one."""

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.hooks is None:
            return super().pre_backward(tensor, module)
        self.hooks.call("on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.hooks is None:
            return super().post_backward(tensor, module)
        self.hooks.call("on_after_backward")
        return tensor

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        # Lightning: Precision._after_closure, once the gradients are there
        if self.together is not None:
            optimizers, self.together = self.together, []
            if optimizers:
                self._prepare_together(model, optimizers)
            return
        if self.hooks is None:
            super()._after_closure(model, optimizer)
            return
        self.hooks.call("on_before_optimizer_step", optimizer)
        trainer = self.hooks.trainer
        if trainer.gradient_clip_val is not None or self.hooks.clips:
            self._clip_gradients(model, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)

    def _prepare_together(self, model: LightningModule, optimizers: list[Optimizer]) -> None:
        """Calls the hooks of all optimizers of a step, and clips their gradients by one norm."""
        trainer: Any = model.trainer
        for optimizer in optimizers:
            call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
            call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        clips_each = any(is_overridden(name, model) for name in ("configure_gradient_clipping", "clip_gradients"))
        for taken in optimizers if clips_each else [Parameters.of(optimizers)]:
            self._clip_gradients(model, taken, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)  # type: ignore[arg-type]


class _Full(_Clipping, _Hooked): ...


class MixedPrecision(_Clipping, ScaledPrecision, _Hooked):
    """Lightning's plugin with the scaler of `loss_scaling.py`.

    A checkpoint stores the loss scale under the name of this class, as Lightning's own files do.
    """

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.autocast_context_manager()


class _Half(_Clipping, HalfPrecision, _Hooked): ...


class _Double(_Clipping, DoublePrecision, _Hooked): ...


def make_precision(name: str, device_type: str) -> Precision:
    """Returns the plugin for the full name of a precision, and a device type: ``"cpu"``, ``"cuda"``, ..."""
    if name in ("16-mixed", "bf16-mixed"):
        scaler = LossScaler(device_type) if name == "16-mixed" else None
        return MixedPrecision(name, device_type, scaler)  # type: ignore[arg-type]
    assert name not in OF_BLOCKS, "see `strategies/block_precision.py`"
    if name in ("16-true", "bf16-true"):
        return _Half(name)  # type: ignore[arg-type]
    return _Double() if name == "64-true" else _Full()


def can_step_together(plugin: Precision) -> bool:
    """Whether several optimizers can step together under a precision plugin: under the engine's own."""
    return isinstance(plugin, _Hooked)


@contextmanager
def stepping_together(trainer: Trainer) -> Iterator[None]:
    """Context of a step of all optimizers of a trainer, at the end of which a loss scaler updates its scale once."""
    plugin: Any = trainer.precision_plugin
    plugin.together = list(trainer.strategy.optimizers)
    try:
        with one_update(trainer):
            yield
    finally:
        plugin.together = None


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Returns the dtype to which autocast rounds in a module's steps; None without autocast."""
    if not isinstance(plugin, lightnings.MixedPrecision):
        return None
    return torch.float16 if plugin.precision == "16-mixed" else torch.bfloat16
