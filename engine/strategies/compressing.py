"""What strategies share that compress gradients or count what they send."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from ..compression import CommHook, Wire

__all__ = ["CompressingStrategy"]


class CompressingStrategy(ParallelStrategy):
    """Mixin that tells a comm hook when a step is over, and whether it counts."""

    comm_hook: CommHook | None = None
    counts_traffic = False
    """Whether what is sent for gradients and parameters is to be counted without a comm hook, too."""

    @property
    def averaging(self) -> CommHook | None:
        """What averages the gradients and counts; None where torch does, uncounted."""
        return self.comm_hook

    @property
    def wires(self) -> list[Wire]:
        """What everything goes through that is counted; empty before training."""
        hook = self.averaging
        return [] if hook is None or hook.wire is None else [hook.wire]

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Of `16-mixed`; others have none."""
        return getattr(self.precision_plugin, "scaler", None)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps, and lets the comm hook keep what it has in store for the next step, unless this one overflowed."""
        hook, scaler = self.comm_hook, self.loss_scaler
        if hook is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # This is how torch lets one know; the scaler itself has read from the device in each step already.
        scale = scaler.get_scale() if scaler is not None else 0.0
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        hook.settle(skipped=scaler is not None and scaler.get_scale() < scale)
        return output

    def post_backward(self, closure_loss: Tensor) -> None:
        """Stops before a step with gradients that are not finite.

        At logged steps only where reading waits for a GPU, or needs a collective since no rank has all averages.
        """
        super().post_backward(closure_loss)
        hook = self.comm_hook
        if hook is None:
            return
        every = self.lightning_module.trainer.log_every_n_steps or 50  # type: ignore[union-attr]
        if (self.root_device.type == "cpu" and not hook.sees_shards_only) or hook.step % every == 0:
            hook.raise_if_bad()

    def on_train_end(self) -> None:
        """Reads what no logged step has."""
        super().on_train_end()
        if self.comm_hook is not None:
            self.comm_hook.raise_if_bad()
