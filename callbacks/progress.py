"""`ProgressBar`: one bar at the bottom of the terminal with metrics below it, drawn at most ten times a second."""

import atexit
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console

from ._bar import BarRenderer, EpochLine, Progress, StockBars, duration, metric_texts, num_train_batches
from ._screen import CellOutput, Screen, screen_of

__all__ = ["ProgressBar"]

_NOTEBOOK_COLUMNS = 100


class ProgressBar(StockBars, LightningProgressBar):
    """Shows a bar for the batches of this epoch, validation, test or prediction, and rows with the logged metrics.

    ``Epoch 2/15  ━━━━━━━━━━━━━━━━━━━━  12/17  0:00:03  eta 0:00:01  4.1 it/s``; on rank 0 only. Output of other ranks
    appears above it, and so does a line for each epoch that is over, with the values that it logged and a star at the
    best one so far: of the value that a callback monitors, or else of the validation's loss. Metrics are read from the
    device when the trainer logs (`log_every_n_steps`), at the end of an epoch and after validation. If nothing can be
    drawn (in a file, or on a terminal without escape codes), only the lines of epochs and the final row of other bars
    are printed. In a notebook all of it is one output of the cell.

    Args:
        refresh_rate: largest number of drawings per second; 0 for no bar.
        leave: keep the bar of every epoch with its metrics, in place of the line.
        theme: styles and format of metrics, as for `lightning.pytorch.callbacks.RichProgressBar`; None for metrics with
            four digits, two spaces apart.
        console_kwargs: arguments of `rich.console.Console`.
    """

    def __init__(
        self,
        refresh_rate: int = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.refresh_rate = refresh_rate
        self.leave = leave
        self.theme = theme or RichProgressBarTheme(
            processing_speed="dim", metrics_text_delimiter="  ", metrics_format=".4g"
        )
        self._console_kwargs = console_kwargs or {}
        self._forget()

    def _forget(self) -> None:
        self._screen: Screen | None = None
        self._renderer: BarRenderer | None = None
        self._shown: Progress | None = None
        self._training: Progress | None = None
        self._line = EpochLine()
        self._is_epoch_over = False
        self._metrics: list[str] = []
        self._drawn_s = 0.0
        self._read_step = -1

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the terminal objects of this process."""
        live = ("_screen", "_renderer", "_shown", "_training")
        return {**self.__dict__, **dict.fromkeys(live), "_line": EpochLine()}

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown; it is not shown on ranks other than 0."""
        return self._enabled and self.refresh_rate > 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Disables the bar on every rank but 0, and keeps the lines of all ranks separate from the bar."""
        super().setup(trainer, pl_module, stage)
        if self.refresh_rate <= 0 or (trainer.is_global_zero and self.is_disabled):
            return
        if self._screen is None:
            self._screen = screen_of(Console(**self._console_kwargs))
            atexit.register(self._screen.release)
        if trainer.world_size > 1 or not isinstance(self._screen, CellOutput):
            self._screen.guard(is_drawn_here=trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keeps the last row if the run ended early."""
        self._finish()
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keeps the last row."""
        self._finish()
        if trainer.is_global_zero:  # other ranks keep the guard: they may still print while rank 0's bar is shown
            self._close()

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.release()
            atexit.unregister(self._screen.release)
        self._screen = self._renderer = None  # the next run may print elsewhere

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for the value whose best is marked."""
        self._line.begin_run(trainer)
        self._is_epoch_over = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins an epoch's bar, and keeps the line of the one before."""
        if self.is_disabled:
            return
        if self._training is not None:
            self._end_epoch(trainer, pl_module)
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar; draws it if due."""
        if self.is_disabled:
            return
        if self._training is None:  # a run resumed within an epoch has no epoch start
            self._begin_epoch(trainer, done=batch_idx + 1)
        step = trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step % every == 0 and step != self._read_step:
            self._read_step = step
            self._read_metrics(trainer, pl_module)
            self._move(batch_idx + 1, is_due=True)
        else:
            self._move(batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the last metrics."""
        if self.is_enabled:
            self._is_epoch_over = True
            self._read_metrics(trainer, pl_module)
            self._draw()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the last epoch's line; of an epoch that was left early, its bar."""
        if self.is_enabled:
            self._end_epoch(trainer, pl_module)
            self._finish()

    def _end_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the line of an epoch that is over: only now are the means of its values known."""
        self._read_metrics(trainer, pl_module)
        if self.leave:
            self._finish()
        elif self._is_epoch_over and self._training and self._screen and self._renderer:
            head = f"{self._training.description.lower()}  {duration(self._training.elapsed_s)}"
            width = self._renderer.width if self._screen.is_live else None
            self._screen.add(self._line.text(trainer, head, self.theme, width))
            self._shown = None
        self._is_epoch_over = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes what was logged before."""
        if self.is_enabled and trainer.state.fn == "fit":
            self._line.begin_validation(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begins the bar of a loader."""
        if self.is_disabled or not self.has_dataloader_changed(dataloader_idx):
            return
        name = self.validation_description
        if trainer.sanity_checking:
            name = self.sanity_check_description
        elif trainer.state.fn == "fit":
            name = f"{self._epoch(trainer)}, {name.lower()}"
        loaders = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._begin(_of_loaders(name, dataloader_idx, loaders), self.total_val_batches_current_dataloader)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Moves the bar; draws it if due."""
        if self.is_enabled:
            self._move(batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the bar of the epoch again; if there is none, keeps the last row."""
        self.reset_dataloader_idx_tracker()
        if self.is_disabled:
            return
        if trainer.state.fn != "fit":
            self._finish()
        elif self._training is not None:
            self._line.end_validation(trainer)
            self._shown = self._training
            self._shown.resume()
            self._read_metrics(trainer, pl_module)
            self._draw()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the bar."""
        self._shown = None
        if self.is_enabled and self._screen is not None:
            self._screen.clear()

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begins the bar of a loader."""
        if self.is_enabled and self.has_dataloader_changed(dataloader_idx):
            name = _of_loaders(self.test_description, dataloader_idx, trainer.num_test_batches)
            self._begin(name, self.total_test_batches_current_dataloader)

    on_test_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the last row."""
        self.reset_dataloader_idx_tracker()
        self._finish()

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begins the bar of a loader."""
        if self.is_enabled and self.has_dataloader_changed(dataloader_idx):
            name = _of_loaders(self.predict_description, dataloader_idx, trainer.num_predict_batches)
            self._begin(name, self.total_predict_batches_current_dataloader)

    on_predict_batch_end = on_validation_batch_end

    on_predict_end = on_test_end

    def _epoch(self, trainer: Trainer) -> str:
        """Names the epoch, counted from 1, as `ConsoleLogger` does."""
        is_limited = trainer.max_epochs is not None and trainer.max_epochs > 0
        return f"Epoch {trainer.current_epoch + 1}" + (f"/{trainer.max_epochs}" if is_limited else "")

    def _begin_epoch(self, trainer: Trainer, done: int = 0) -> None:
        self._line.begin(trainer)
        self._metrics = self._metrics if self._training else []
        self._training = self._begin(self._epoch(trainer), num_train_batches(trainer, done), done)

    def _begin(self, description: str, total: float, done: int = 0) -> Progress:
        if self._renderer is None:
            console = Console(**self._console_kwargs)
            self._screen = self._screen or screen_of(console)
            width = None
            if isinstance(self._screen, CellOutput):  # in a notebook Rich would show each row in a separate output
                console, width = Console(force_jupyter=False, color_system=None), _NOTEBOOK_COLUMNS
            self._renderer = BarRenderer(console, self.theme, width)
        self._shown = progress = Progress(description, total, done)
        self._draw()
        return progress

    def _move(self, done: int, is_due: bool = False) -> None:
        progress = self._shown
        if progress is None or self._screen is None:
            return
        progress.total = max(progress.total, done)  # an estimate: with several optimizers `global_step` exceeds it
        period_s = max(1 / self.refresh_rate, self._screen.period_s)
        if is_due or done == progress.total or time.monotonic() - self._drawn_s >= period_s:
            progress.advance_to(done)
            self._draw()
        else:
            progress.completed = done

    def _read_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._metrics = [*metric_texts(self.get_metrics(trainer, pl_module), self.theme.metrics_format)]

    def _draw(self) -> None:
        if self._screen is not None and self._screen.is_live:
            self._screen.show(self._rows)
            self._drawn_s = time.monotonic()

    def _rows(self) -> list[str]:
        if self._shown is None or self._renderer is None:
            return []
        return self._renderer.rows(self._shown, self._metrics if self._training is not None else ())

    def _finish(self) -> None:
        """Ends the bar and keeps its row, if there is one."""
        if self._screen is not None:
            self._screen.keep(self._rows())
        self._shown = self._training = None


def _of_loaders(name: str, index: int, loaders: Any) -> str:
    """Returns the name, with the loader's number if there are several."""
    num_loaders = len(loaders) if isinstance(loaders, list) else 1
    return name if num_loaders == 1 else f"{name} {index + 1}/{num_loaders}"
