"""`ProgressBar`: Rich's progress bar, drawn ten times a second, with metrics as of the last logging interval."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

__all__ = ["ProgressBar"]

_PERIOD_S = 0.1


class ProgressBar(RichProgressBar):
    """Lightning's `RichProgressBar`, without its cost per step.

    The bar moves at most every 0.1 s. Metrics are read from the device when the trainer logs (`log_every_n_steps`), at
    the end of an epoch and after validation; Lightning's reads them, and so waits for the device, at every step.
    Arguments as for `lightning.pytorch.callbacks.RichProgressBar`.
    """

    _drawn = 0.0
    _read_step = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar where that is due."""
        step = trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = every and step % every == 0 and step != self._read_step
        if is_logged or self._is_due(batch_idx + 1, self.total_train_batches):
            if not self.is_disabled and self.train_progress_bar_id is None:
                self._initialize_train_progress_bar_id()  # Lightning: so does its own, after a resumption in mid-epoch
            self._update(self.train_progress_bar_id, batch_idx + 1)
        if is_logged:
            self._read_step = step
            self._update_metrics(trainer, pl_module)
            self.refresh()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Moves the bar where that is due."""
        if self._is_due(batch_idx + 1, self.total_val_batches_current_dataloader):
            super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Moves the bar where that is due."""
        if self._is_due(batch_idx + 1, self.total_test_batches_current_dataloader):
            super().on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def _is_due(self, done: int, total: float) -> bool:
        now = time.monotonic()
        if done != total and now - self._drawn < _PERIOD_S:
            return False
        self._drawn = now
        return True
