"""`ConsoleLogger`: prints progress as plain lines, for output that is not a terminal (CI, SLURM, a file)."""

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar

from ._bar import StockBars, metric_texts, new_values
from ._interval import steps_or_none
from ._screen import can_draw
from .progress import ProgressBar
from .throughput import ThroughputMonitor

__all__ = ["ConsoleLogger", "default_progress_bar"]

_INTERVAL_STEPS = 50
"""Steps between two lines if `log_every_n_steps=0` turns logging off."""


class ConsoleLogger(StockBars, LightningProgressBar):
    """Prints one line every few optimizer steps, and one line with the metrics of each validation; rank 0 only.

    ``epoch 1/3  step 50/168  train/loss 0.1234  21.5 steps/s  eta 0:00:05``. The line of a step has the metrics logged
    with ``prog_bar=True`` since the last line, the line of a validation all metrics that it logged. The trainer itself
    prints the results of `validate` and `test`, as `verbose` says. Values are read from the device for printed lines
    only. The speed is the mean since the start, including validation, so that the eta is realistic; if the trainer has
    a `ThroughputMonitor`, its last samples/s are shown instead.

    This is the trainer's only progress bar (Lightning allows no second one); see `default_progress_bar`.

    Args:
        every_n_steps: optimizer steps between two lines; None for the trainer's `log_every_n_steps`, at which the
            values are read anyway.

    Raises:
        ValueError: `every_n_steps` is not a positive whole number.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = steps_or_none(every_n_steps)
        self._metrics_before: dict[str, Any] = {}  # metrics from before the evaluation
        self._printed: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._first_step = self._printed_step = trainer.global_step
        self._printed = {}
        self._started = time.perf_counter()
        # The last step of the run; computed once, because the trainer's property is slow.
        steps = trainer.estimated_stepping_batches
        # The trainer returns -1 for a loader of unknown length without max_steps.
        self._last_step = None if steps in (float("inf"), -1) else int(steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Prints a line if the interval ends here."""
        step = trainer.global_step
        if not self._enabled or step == self._printed_step:
            return
        every = self.every_n_steps or trainer.log_every_n_steps or _INTERVAL_STEPS  # type: ignore[attr-defined]
        if step % every == 0 or step == self._last_step:
            self._printed_step = step
            metrics = self._new(trainer, self.get_metrics(trainer, pl_module))
            self._print(self._progress(trainer), *metric_texts(metrics), self._speed(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers the metrics from before the validation."""
        self._metrics_before = dict(trainer.callback_metrics) if self._enabled and trainer.state.fn == "fit" else {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the metrics of a validation during training."""
        if self._enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            logged, self._metrics_before = new_values(trainer.callback_metrics, self._metrics_before), {}
            self._print(f"validation after step {trainer.global_step}", *metric_texts(self._new(trainer, logged)))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints if enabled; `LightningModule.print` calls it."""
        if self._enabled:
            print(*args, **{"flush": True, **kwargs})

    def _print(self, *parts: str) -> None:
        print("  ".join(text for text in parts if text), flush=True)

    def _progress(self, trainer: Trainer) -> str:
        epochs = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        last = self._last_step
        return f"epoch {trainer.current_epoch + 1}{epochs}  step {trainer.global_step}{f'/{last}' if last else ''}"

    def _speed(self, trainer: Trainer) -> str:
        steps_per_s = (trainer.global_step - self._first_step) / max(time.perf_counter() - self._started, 1e-9)
        monitors = (c for c in trainer.callbacks if isinstance(c, ThroughputMonitor))  # type: ignore[attr-defined]
        samples_per_s = next((m.last.get("throughput/samples_per_s") for m in monitors), None)
        speed = f"{steps_per_s:.1f} steps/s" if samples_per_s is None else f"{samples_per_s:.1f} samples/s"
        last = self._last_step
        if last is None:
            return speed
        # An estimate: with several optimizers `global_step` exceeds the last step.
        return f"{speed}  eta {timedelta(seconds=round(max(0, last - trainer.global_step) / steps_per_s))}"

    def _new(self, trainer: Trainer, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns `metrics` without those that were printed and have not been logged again."""
        logged = trainer.callback_metrics
        old = logged.keys() - new_values(logged, self._printed)
        self._printed.update({name: logged[name] for name in metrics if name in logged})
        return {name: value for name, value in metrics.items() if name not in old}


def default_progress_bar() -> LightningProgressBar:
    """Returns a progress bar for a notebook or a terminal with escape codes, else a `ConsoleLogger`."""
    return ProgressBar() if can_draw() else ConsoleLogger()
