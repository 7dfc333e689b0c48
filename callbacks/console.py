"""`ConsoleLogger`: progress as plain lines, for output that is not a terminal: CI, SLURM, a file."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from torch import Tensor

__all__ = ["ConsoleLogger", "default_progress_bar"]


class ConsoleLogger(ProgressBar):
    """Prints one line every so many optimizer steps, and one with the metrics at the end of each evaluation.

    ``epoch 1/3  step 50/168  train/loss 0.1234  21.5 steps/s  eta 0:00:05``; rank 0 only. Values are read from the
    device for printed lines only.

    Args:
        every_n_steps: optimizer steps between two lines.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__()
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, but got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self._enabled = True

    def disable(self) -> None:
        """Called by Lightning on every rank but 0."""
        self._enabled = False

    def enable(self) -> None:
        """Prints again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._first_step = self._printed_step = trainer.global_step
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Prints a line where one is due."""
        step = trainer.global_step
        if not self._enabled or step == self._printed_step:
            return
        if step % self.every_n_steps == 0 or step == self._last_step(trainer):
            self._printed_step = step
            self._print(
                self._progress(trainer), self._values(self.get_metrics(trainer, pl_module)), self._speed(trainer)
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the metrics of the validation."""
        if self._enabled and not trainer.sanity_checking:
            self._print(f"validation after step {trainer.global_step}", self._evaluated(trainer, "val"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the metrics of the test."""
        if self._enabled:
            self._print("test", self._evaluated(trainer, "test"))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """What `LightningModule.print` calls."""
        if self._enabled:
            print(*args, **{"flush": True, **kwargs})

    def _print(self, *parts: str) -> None:
        print("  ".join(part for part in parts if part), flush=True)

    def _progress(self, trainer: Trainer) -> str:
        epochs = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        last = self._last_step(trainer)
        return f"epoch {trainer.current_epoch + 1}{epochs}  step {trainer.global_step}{f'/{last}' if last else ''}"

    def _speed(self, trainer: Trainer) -> str:
        per_s = (trainer.global_step - self._first_step) / max(time.perf_counter() - self._started, 1e-9)
        last = self._last_step(trainer)
        left = timedelta(seconds=round((last - trainer.global_step) / per_s)) if last and per_s else None
        return f"{per_s:.1f} steps/s" + (f"  eta {left}" if left is not None else "")

    @staticmethod
    def _last_step(trainer: Trainer) -> int | None:
        """The optimizer step at which the run ends; None where that is not known."""
        steps = trainer.estimated_stepping_batches
        return None if steps == float("inf") else int(steps)

    def _evaluated(self, trainer: Trainer, stage: str) -> str:
        metrics = trainer.callback_metrics
        named = {name: value for name, value in metrics.items() if stage in name}
        return self._values(named or metrics)

    @staticmethod
    def _values(metrics: Mapping[str, Any]) -> str:
        shown = {name: value for name, value in metrics.items() if name != "v_num"}
        return "  ".join(f"{name} {float(v):.4g}" for name, v in shown.items() if isinstance(v, (int, float, Tensor)))


def default_progress_bar() -> ProgressBar:
    """A rich progress bar where the output is a terminal, plain lines where it is not."""
    return RichProgressBar() if sys.stdout.isatty() else ConsoleLogger()
