"""Brings a batch to the device, by way of the hooks a user overrode for it."""

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from .hooks import overridden

__all__ = ["Transfer"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Lightning's chain of hooks; none of it for plain tensors that are where they should be already."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._is_plain = not (
            any(overridden(trainer.lightning_module, LightningModule, name) for name in _HOOKS)
            or (
                trainer.datamodule is not None  # type: ignore[attr-defined]
                and any(overridden(trainer.datamodule, LightningDataModule, name) for name in _HOOKS)  # type: ignore[attr-defined]
            )
            or overridden(trainer.strategy, Strategy, "batch_to_device")
            or overridden(trainer.precision_plugin, Precision, "convert_input")
        )

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The batch, on the device."""
        if self._is_plain and self._is_there(batch):
            return batch
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        # Lightning: LightningModule._on_before_batch_transfer and Strategy.batch_to_device call the three hooks.
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)

    def _is_there(self, batch: Any) -> bool:
        kind = type(batch)
        items = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
        # Exactly Tensor: whatever else has a `to` method of its own expects to be asked. (A loop takes half of `all`.)
        for item in items:  # noqa: SIM110
            if type(item) is not Tensor or item.device != self._device:
                return False
        return True
