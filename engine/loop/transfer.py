"""Moves a batch to the device, through the hooks that a user has overridden.

On an accelerator plain tensors are copied on a separate stream. A batch is fetched while the device still computes the
previous one, so the copy overlaps with this computation. If memory is not pinned, the process waits for the copy; on
the compute stream it would also wait for all earlier computation.
"""

import functools
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from ..devices import module_of
from .hooks import overridden

__all__ = ["Transfer"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Lightning's chain of hooks; a batch of plain tensors skips it if nobody has overridden a hook."""

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
        overridden_hooks = {
            name
            for name in _HOOKS
            if overridden(trainer.lightning_module, LightningModule, name)
            or (data is not None and overridden(data, LightningDataModule, name))
        }
        moves_itself = "transfer_batch_to_device" in overridden_hooks or overridden(
            trainer.strategy, Strategy, "batch_to_device"
        )
        self._is_plain = not (
            overridden_hooks or moves_itself or overridden(trainer.precision_plugin, Precision, "convert_input")
        )
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
