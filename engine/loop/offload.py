"""`offload="activations"`: the forward of each training step keeps what backward needs in host memory."""

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from ..strategies.offload import ActivationsOnHost

__all__ = ["OffloadActivations"]


class OffloadActivations(Callback):
    """Has training steps keep their activations in host memory while a trainer runs."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the hooks around the precision's context, in which each strategy runs its steps."""
        plugin, device_type = trainer.precision_plugin, trainer.strategy.root_device.type
        if device_type == "cpu":
            rank_zero_info("offload='activations': they are in host memory as it is.")
            return
        precise = plugin.train_step_context

        def context() -> AbstractContextManager[Any]:
            return ActivationsOnHost(device_type, precise())

        vars(plugin)["train_step_context"] = context

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends it."""
        vars(trainer.precision_plugin).pop("train_step_context", None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends it."""
        vars(trainer.precision_plugin).pop("train_step_context", None)
