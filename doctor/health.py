"""Measures the health of training at the end of an interval: gradients, weights, loss scale, learning rate.

There is no communication, and only the last step of an interval has extra work. On accelerators the numbers are copied
to the host asynchronously, and are reported with the next interval.
"""

import contextlib
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from polyphase.callbacks.replica_guard import why_not
from polyphase.engine.devices import module_of
from polyphase.engine.distributed.buckets import local_part
from polyphase.engine.strategies import adapt

__all__ = ["HealthWatch", "lr_interval_steps", "unfused_optimizer"]

_MAX_NAMES = 16


class HealthWatch:
    """Measures a module and its optimizers.

    Args:
        trainer: an engine at the start of training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # A parameter server applies gradients in another process.
        self._sees_gradients = adapt(trainer.strategy).capabilities.keeps_step
        self._is_replicated = why_not(trainer) is None and trainer.layout.num_sharing == 1
        self._copied: _Measurement | None = None

    @torch.no_grad()
    def look(self, module: LightningModule) -> dict[str, Any]:
        """Returns the available numbers by the field names of an `Interval`."""
        numbers: dict[str, Any] = {"loss_scale": self._loss_scale(), **self._rates()}
        if self._sees_gradients:
            before, self._copied = self._copied, _Measurement(self._trainer, module, self._is_replicated)
            # On a CPU the numbers are available at once.
            measurement = self._copied if self._copied.is_ready() else before
            if measurement is not None and measurement.is_ready():
                numbers |= measurement.read()
                self._copied = None if measurement is self._copied else self._copied
        return numbers

    def _loss_scale(self) -> float | None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        # No extra wait: the scaler reads from the device in each step anyway, to decide whether to skip it.
        return None if scaler is None else float(scaler.get_scale())

    def _rates(self) -> dict[str, Any]:
        optimizers = self._trainer.optimizers
        groups = getattr(optimizers[0], "param_groups", None) if optimizers else None
        lr = groups[0].get("lr") if groups else None
        steps = [getattr(config.scheduler, "last_epoch", None) for config in self._trainer.lr_scheduler_configs]
        steps_done = [step for step in steps if step is not None]
        return {
            "lr": None if lr is None or isinstance(lr, Tensor) else float(lr),
            "lr_steps": min(steps_done) if steps_done else None,
        }


class _Measurement:
    """Norms of gradients and a checksum of weights, which are being copied to the host."""

    def __init__(self, trainer: Any, module: LightningModule, is_replicated: bool) -> None:
        device = trainer.strategy.root_device
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and not p.is_meta]
        gradients = [None if p.grad is None else local_part(p.grad) for _, p in named]
        self._names = [name for name, _ in named]
        self._step = trainer.global_step
        # If no parameter has a gradient, they were already cleared.
        self._has_gradients = any(gradient is not None for gradient in gradients)
        zero = torch.zeros((), device=device)
        norms = [zero if g is None else torch.linalg.vector_norm(g).to(device, torch.float32) for g in gradients]
        self._num_norms = len(norms)
        if is_replicated:
            wide = torch.float32 if device.type == "mps" else torch.float64
            norms += [torch.linalg.vector_norm(local_part(p), dtype=wide) for _, p in named]
        self._event: Any = None
        self._values = torch.stack([norm.to(norms[-1].dtype) for norm in norms]) if norms else zero.reshape(1)[:0]
        backend = module_of(device)
        if device.type != "cpu" and hasattr(backend, "Event"):
            self._event = backend.Event()
            copy = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
            self._values = copy.copy_(self._values, non_blocking=True)
            self._event.record()

    def is_ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> dict[str, Any]:
        """Returns the numbers."""
        values = self._values.tolist()
        norms, weights = values[: self._num_norms], values[self._num_norms :]
        numbers: dict[str, Any] = {}
        if self._has_gradients:
            dead = [name for name, norm in zip(self._names, norms, strict=True) if norm == 0.0]
            numbers["grad_norm"] = float(sum(norm**2 for norm in norms) ** 0.5)
            numbers["without_gradient"] = dead[:_MAX_NAMES]
        if weights:
            # Weighted, so that swapping two parameters changes the checksum.
            numbers["checksum"] = sum(number * norm for number, norm in enumerate(weights, start=1))
            numbers["checksum_step"] = self._step
        return numbers


def lr_interval_steps(trainer: Any) -> int | None:
    """Returns the interval of the learning-rate schedulers in optimizer steps; None without one, or for epochs."""
    with contextlib.suppress(AttributeError):
        steps = [c.frequency for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        return max(steps) if len(steps) == len(trainer.lr_scheduler_configs) and steps else None
    return None


def unfused_optimizer(trainer: Any) -> str | None:
    """Returns the first optimizer that could step in one kernel and does not, as ``"AdamW by foreach"``; None without.

    torch's optimizers that have such a kernel have the option `fused` in their groups.
    """
    for optimizer in trainer.optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            if not group.get("fused", True):
                how = "a loop over its parameters" if group.get("foreach") is False else "foreach"
                return f"{type(optimizer).__name__} by {how}"
    return None
