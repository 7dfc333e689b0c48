"""`GradientNormMonitor`: logs the norm of all gradients of the model, over all shards."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ._interval import IntervalCallback

__all__ = ["GradientNormMonitor"]


class GradientNormMonitor(IntervalCallback):
    """Logs `grad_norm`, the norm before clipping that the strategy computed at the logged step; it has no extra cost.

    Raises:
        MisconfigurationException: at the start of `fit`, if gradients are not clipped by norm, as then no norm exists.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy will compute a norm."""
        if stage == "fit" and (not trainer.gradient_clip_val or trainer.gradient_clip_algorithm == "value"):
            raise MisconfigurationException(
                "GradientNormMonitor logs the norm that clipping computes: set gradient_clip_val, with"
                " gradient_clip_algorithm='norm' (a large value clips nothing)."
            )

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Reads the norm if the interval ends here."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns the norm, which is the same on all ranks."""
        return {"grad_norm": float(trainer.grad_norm)}  # type: ignore[attr-defined]
