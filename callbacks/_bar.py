"""Renders a progress bar: a row with the bar, and rows of metrics below it, none wider than the terminal."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from math import isfinite
from typing import Any

from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar as Bar
from rich.segment import Segment
from rich.text import Text
from torch import Tensor

__all__ = [
    "BarRenderer",
    "EpochLine",
    "Progress",
    "StockBars",
    "duration",
    "metric_texts",
    "new_values",
    "num_train_batches",
]

_GAP = "  "
_BAR_WIDTHS = (8, 40)
"""Smallest and largest width of the bar itself, in columns."""
_NUM_SAMPLES = 100
"""Number of drawings over which the speed is averaged."""


class Progress:
    """The progress through a loader.

    Args:
        description: name of the stage, such as an epoch or a validation.
        total: number of batches; infinity if unknown.
        completed: number of batches done before this run, in a resumed epoch.
    """

    def __init__(self, description: str, total: float, completed: int = 0) -> None:
        self.description = description
        self.total = total
        self.completed = completed
        self._began_s = time.monotonic()
        self._samples = deque([(self._began_s, completed)], maxlen=_NUM_SAMPLES)
        self._speed: float | None = None

    def resume(self) -> None:
        """Restarts the measurement of the speed, so that a pause since the last batch does not count."""
        self._samples = deque([(time.monotonic(), self.completed)], maxlen=_NUM_SAMPLES)

    def advance_to(self, completed: int) -> None:
        """Sets the number of batches done."""
        self.completed = completed
        self._samples.append((time.monotonic(), completed))
        (began_s, first), (ended_s, last) = self._samples[0], self._samples[-1]
        if ended_s > began_s:
            self._speed = (last - first) / (ended_s - began_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first batch."""
        return time.monotonic() - self._began_s

    @property
    def batches_per_s(self) -> float | None:
        """Mean speed over the last drawings; None before the second drawing."""
        return self._speed

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds for the remaining batches; None if unknown, or if no batches remain."""
        left = self.total - self.completed
        return left / self._speed if self._speed and isfinite(left) and left > 0 else None


class BarRenderer:
    """Turns progress and metrics into rows of text for one console.

    Args:
        console: determines width, height, colours and characters.
        theme: styles, and the format of metrics.
        width: width in columns; None for the console's width at each drawing.
    """

    def __init__(self, console: Console, theme: RichProgressBarTheme, width: int | None = None) -> None:
        self._console = console
        self._theme = theme
        self._width = width

    @property
    def width(self) -> int:
        """The columns that a row may have: a full one would move the cursor to the next row."""
        return (self._width or self._console.size.width) - 1

    def rows(self, progress: Progress, metrics: Iterable[str]) -> list[str]:
        """Returns the bar's row and the rows of metrics, as many as fit on the screen."""
        size, width = self._console.size, self.width
        rows: list[Any] = [_Row(self._parts(progress, width))]
        packed = [*_packed(metrics, self._theme.metrics_text_delimiter, width)]
        room = len(packed) if self._width else max(1, size.height - 3)  # an empty line above, the bar, a line to spare
        if len(packed) > room:
            packed[room - 1 :] = [f"... and {len(packed) - room + 1} more rows of metrics"[:width]]
        rows += [Text(row, style=self._theme.metrics, end="") for row in packed]
        return [self._drawn(row) for row in rows]

    def _drawn(self, row: Any) -> str:
        with self._console.capture() as capture:
            self._console.print(row, end="", soft_wrap=True)
        return capture.get()

    def _parts(self, progress: Progress, width: int) -> list[Any]:
        theme = self._theme
        total = int(progress.total) if isfinite(progress.total) else "?"
        speed, remaining_s = progress.batches_per_s, progress.remaining_s
        texts = [
            (progress.description, theme.description),
            (f"{progress.completed}/{total}", theme.batch_progress),
            (_clock(progress.elapsed_s), theme.time),
            ("" if remaining_s is None else f"eta {_clock(remaining_s)}", theme.time),
            ("" if speed is None else f"{speed:.{1 if speed >= 1 else 3}f} it/s", theme.processing_speed),
        ]
        shown = [(text, style) for text, style in texts if text]
        least, most = _BAR_WIDTHS
        while len(shown) > 2 and _width_of(shown) + least > width:
            shown.pop()  # the last part is the least important
        room = width - _width_of(shown)
        first, *others = [Text(text, style=style, end="") for text, style in shown]
        if room < least:
            first.truncate(max(1, width - len(_GAP) - sum(cell_len(text) for text, _ in shown[1:])))
            return [first, *others]
        return [first, self._bar(progress, min(room, most)), *others]

    def _bar(self, progress: Progress, width: int) -> Bar:
        return Bar(
            total=progress.total if isfinite(progress.total) else None,
            completed=progress.completed,
            width=width,
            pulse=not isfinite(progress.total),
            complete_style=self._theme.progress_bar,
            finished_style=self._theme.progress_bar_finished,
            pulse_style=self._theme.progress_bar_pulse,
        )


class _Row:
    """Renderables side by side."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, column in enumerate(self._parts):
            if i:
                yield Text(_GAP, end="")
            segments = [*console.render(column, options)]
            yield from segments
            if isinstance(column, Bar):  # without colours Rich draws only the completed part
                yield Text(" " * ((column.width or 0) - Segment.get_line_length(segments)), end="")


def metric_texts(metrics: dict[str, Any], number_format: str = ".4g") -> Iterator[str]:
    """Formats each metric as ``name value``, the same way in all progress bars.

    Args:
        metrics: numbers, one-element tensors or texts by name; the logger's version number is left out.
        number_format: format of the numbers.
    """
    for name, value in metrics.items():
        if name != "v_num":
            is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
            yield f"{name} {float(value):{number_format}}" if is_number else f"{name} {value}"


class EpochLine:
    """The line that is kept of an epoch: its time and the values that it has logged, with a star at the best so far.

    The best is that of the first callback that monitors a value (`ModelCheckpoint`, `EarlyStopping`); without one, the
    smallest value of the validation whose name ends with "loss".
    """

    def __init__(self) -> None:
        self._at_start: dict[str, Any] = {}
        self._before_validation: dict[str, Any] = {}
        self._validated: set[str] = set()
        self._watched: tuple[str, bool] | None = None
        self._best: float | None = None

    def begin_run(self, trainer: Any) -> None:
        """Looks for the monitored value, and for its best before a resumption."""
        self._watched = self._best = None
        for callback in trainer.callbacks:
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str):
                self._watched = monitor, getattr(callback, "mode", "min") == "max"
                best = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
                self._best = float(best) if best is not None and isfinite(best) else None
                return

    def begin(self, trainer: Any) -> None:
        """Begins an epoch: what is logged from now on belongs to it."""
        self._at_start, self._validated = dict(trainer.callback_metrics), set()

    def begin_validation(self, trainer: Any) -> None:
        """Begins a validation within the epoch."""
        self._before_validation = dict(trainer.callback_metrics)

    def end_validation(self, trainer: Any) -> None:
        """Notes which values the validation has logged."""
        self._validated |= new_values(trainer.callback_metrics, self._before_validation).keys()

    def text(self, trainer: Any, head: str, theme: RichProgressBarTheme, width: int | None) -> str:
        """Returns the line of an epoch whose values are complete.

        Args:
            trainer: has the values.
            head: the epoch and its time.
            theme: the format of the values.
            width: most columns; values beyond them are counted only. None for all values.
        """
        values = new_values(trainer.callback_metrics, self._at_start)
        forks = {f"{name}_{kind}" for name in values for kind in ("step", "epoch")}
        values = {name: value for name, value in values.items() if name not in forks}
        watched, is_best = self._judge(values)
        texts = {name: text for name in values for text in metric_texts({name: values[name]}, theme.metrics_format)}
        if is_best and watched is not None:
            texts[watched] += "*"
        in_bar = trainer.progress_bar_metrics
        names = sorted(texts, key=lambda name: (name != watched, name not in in_bar))  # the least important at the end
        for num_shown in range(len(names), -1, -1):
            rest = [f"+{len(names) - num_shown}"] if num_shown < len(names) else []
            kept = [text for name, text in texts.items() if name in names[:num_shown]]
            line = theme.metrics_text_delimiter.join([head, *kept, *rest])
            if width is None or cell_len(line) <= width:
                return line
        return head

    def _judge(self, values: dict[str, Any]) -> tuple[str | None, bool]:
        losses = (name for name in values if name in self._validated and name.lower().endswith("loss"))
        name, is_largest = self._watched or (next(losses, None), False)
        if name is None or name not in values:
            return None, False
        value = float(values[name])
        is_best = self._best is None or (value > self._best if is_largest else value < self._best)
        if is_best:
            self._best = value
        return name, is_best


def new_values(values: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Returns the logged values that were not there before: a new one is another object in other memory."""
    return {name: value for name, value in values.items() if not _is_same(value, earlier.get(name))}


def _is_same(value: Any, earlier: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(earlier, Tensor):
        return value.data_ptr() == earlier.data_ptr()  # each read returns another view of one logged value
    return value is earlier


def _packed(texts: Iterable[str], gap: str, width: int) -> Iterator[str]:
    """Packs the texts into rows of at most `width` columns; a text that is wider continues in the next row."""
    row = ""
    for text in texts:
        if row and cell_len(row + gap + text) <= width:
            row += gap + text
            continue
        if row:
            yield row
        *full, row = chop_cells(text, width)
        yield from full
    if row:
        yield row


def _width_of(shown: list[tuple[str, Any]]) -> int:
    """Returns the number of columns of all parts except the bar."""
    return sum(cell_len(text) + len(_GAP) for text, _ in shown)


def duration(seconds: float) -> str:
    """``1.2 s``, ``1 min 2 s``, ``1 h 2 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


# --- `train_progress_bar` and similar attributes, which scripts read from Lightning's `TQDMProgressBar`


@dataclasses.dataclass(frozen=True)
class _BarState:
    """The progress of a stage, with tqdm's attribute names."""

    desc: str
    """Name of the stage: Epoch, Validation, Testing or Predicting."""
    n: int
    """Number of batches done."""
    total: float
    """Total number of batches; infinity if unknown."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this bar has desc, n and total, but no {name!r}: it is no tqdm bar. To use one, pass"
            " Engine(callbacks=[TQDMProgressBar()]) (lightning.pytorch.callbacks)."
        )


class StockBars:
    """Adds the attributes of `TQDMProgressBar` to a progress bar; they are computed at access.

    In evaluation the batches of all loaders are counted together.
    """

    trainer: Any
    _enabled = True

    def disable(self) -> None:
        """Called by Lightning on every rank but 0."""
        self._enabled = False

    def enable(self) -> None:
        """Shows the progress again."""
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether progress is shown; read by `LightningModule.print`."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is shown."""
        return not self.is_enabled

    @property
    def train_progress_bar(self) -> _BarState:
        """The progress of the latest training epoch, which may have ended."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return _BarState("Epoch", done, num_train_batches(self.trainer, done))

    @property
    def val_progress_bar(self) -> _BarState:
        """The progress of the latest validation: of `validate` if that was called last, otherwise of `fit`."""
        trainer = self.trainer
        is_alone = trainer.state.fn == "validate"
        loop = trainer.validate_loop if is_alone else trainer.fit_loop.epoch_loop.val_loop
        return _BarState("Validation", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def test_progress_bar(self) -> _BarState:
        """The progress of the latest test, which may have ended."""
        loop = self.trainer.test_loop
        return _BarState("Testing", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def predict_progress_bar(self) -> _BarState:
        """The progress of the latest prediction, which may have ended."""
        loop = self.trainer.predict_loop
        return _BarState("Predicting", loop.batch_progress.current.ready, _total(loop.max_batches))


def num_train_batches(trainer: Any, done: int) -> float:
    """Returns the number of batches in this epoch, limited by `max_steps`; infinity if unknown."""
    num_batches = trainer.num_training_batches
    if trainer.max_steps is None or trainer.max_steps < 0:
        return num_batches
    per_step = trainer.accumulate_grad_batches
    return min(num_batches, done - done % per_step + per_step * max(0, trainer.max_steps - trainer.global_step))


def _total(batches: Any) -> float:
    return sum(batches) if isinstance(batches, list) else batches
