"""`ConsoleLogger`: progress as plain lines, for output that is not a terminal: CI, SLURM, a file."""

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar

from ._bar import metric_texts
from ._interval import positive_steps
from ._screen import can_draw
from ._stock_bars import StockBars
from .progress import ProgressBar
from .throughput import ThroughputMonitor

__all__ = ["ConsoleLogger", "default_progress_bar"]

_INTERVAL_STEPS = 50
"""Steps between two lines where `log_every_n_steps=0` says that nothing is logged."""


class ConsoleLogger(StockBars, LightningProgressBar):
    """Prints one line every so many optimizer steps, and one with the metrics of each validation in between.

    ``epoch 1/3  step 50/168  train/loss 0.1234  21.5 steps/s  eta 0:00:05``; rank 0 only. The line of a step has what
    was logged with ``prog_bar=True``, that of a validation all that the validation logged. Results of `validate` and
    `test` are the trainer's to print, once, as `verbose` says. Values are read from the device for printed lines only.
    The speed is the mean since the start, validation included, for an honest eta; where the trainer has a
    `ThroughputMonitor` its last samples/s stand in its place.

    It is the trainer's one progress bar (Lightning allows no second); see `default_progress_bar`.

    Args:
        every_n_steps: optimizer steps between two lines; None for the trainer's `log_every_n_steps`, at which the
            values are read anyway.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = None if every_n_steps is None else positive_steps(every_n_steps, " (None: the trainer's)")
        self._enabled = True
        self._known: dict[str, Any] = {}  # metrics from before the evaluation

    def disable(self) -> None:
        """Called by Lightning on every rank but 0."""
        self._enabled = False

    def enable(self) -> None:
        """Prints again."""
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether it prints; `LightningModule.print` asks it."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is printed."""
        return not self._enabled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._first_step = self._printed_step = trainer.global_step
        self._started = time.perf_counter()
        # Where the run ends; asked once, as the trainer takes a while to say so.
        steps = trainer.estimated_stepping_batches
        # -1: a loader of unknown length, without max_steps
        self._last_step = None if steps in (float("inf"), -1) else int(steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Prints a line where one is due."""
        step = trainer.global_step
        if not self._enabled or step == self._printed_step:
            return
        every = self.every_n_steps or trainer.log_every_n_steps or _INTERVAL_STEPS  # type: ignore[attr-defined]
        if step % every == 0 or step == self._last_step:
            self._printed_step = step
            self._print(
                self._progress(trainer), self._values(self.get_metrics(trainer, pl_module)), self._speed(trainer)
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers what is known already."""
        self._known = dict(trainer.callback_metrics) if self._enabled and trainer.state.fn == "fit" else {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the metrics of a validation in mid-training."""
        if self._enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._print(f"validation after step {trainer.global_step}", self._evaluated(trainer))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints if enabled; `LightningModule.print` calls it."""
        if self._enabled:
            print(*args, **{"flush": True, **kwargs})

    def _print(self, *parts: str) -> None:
        print("  ".join(part for part in parts if part), flush=True)

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
        # An estimate: with several optimizers `global_step` runs past it.
        return f"{speed}  eta {timedelta(seconds=round(max(0, last - trainer.global_step) / steps_per_s))}"

    def _evaluated(self, trainer: Trainer) -> str:
        """Describes the metrics that the evaluation logged: those whose value is another object than before it."""
        known, self._known = self._known, {}
        metrics = trainer.callback_metrics
        return self._values({name: value for name, value in metrics.items() if known.get(name) is not value})

    @staticmethod
    def _values(metrics: dict[str, Any]) -> str:
        return "  ".join(metric_texts(metrics))


def default_progress_bar() -> LightningProgressBar:
    """One bar in a notebook and on a terminal with escape codes, plain lines elsewhere."""
    return ProgressBar() if can_draw() else ConsoleLogger()
