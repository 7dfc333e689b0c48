"""The logger connector, which computes logged metrics when they are read, not at every step.

Lightning rebuilds the dicts behind `callback_metrics`, `logged_metrics` and `progress_bar_metrics` after every batch,
and then reads each progress-bar value from the device. The properties rebuild the dicts anyway whenever they are read.
So it is enough to rebuild them on a read, and before the values of a batch or an epoch are dropped.
"""

import inspect
import logging
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from .._compat.lightning import _METRICS, _LoggerConnector, _ResultCollection, _ResultMetric
from .padding_batch import EvalPadding
from .reduction import as_numbers, has_unreduced, reduce_results

__all__ = ["LoggerConnector", "is_asynchronous"]

_MIN_READS = 3
"""Number of successive steps that read the progress bar's metrics, after which a warning is logged."""
_READ_WARNING = (
    "%s reads `progress_bar_metrics` at every step, and the host waits for the device each time. Read them at logging"
    " intervals, as polyphase.callbacks.ProgressBar does."
)

log = logging.getLogger("polyphase.engine")


def is_asynchronous(value: Any) -> bool:
    """Whether reading `value` waits for a device that computes asynchronously."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


class LoggerConnector(_LoggerConnector):  # Lightning: Trainer._logger_connector
    """Lightning's connector, with metrics collected on demand."""

    results: _ResultCollection | None = None
    """The results that the current batch logs to; None between batches, and in Lightning's own loops."""
    padding: EvalPadding | None = None
    """Knows which ranks have batches to evaluate, if the engine splits them; otherwise None."""
    all_ranks_reach_end = True
    """Whether all ranks evaluate each loader to its end, so that they can communicate there."""
    names_of_fillers: set[str]
    """The names of the values that only fillers of this rank have logged, in this epoch or evaluation."""
    _read_step = -1
    _num_reads = 0

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.names_of_fillers = set()
        self.issued_warnings: set[str] = set()
        """The warnings that were issued already, by the name of a logged value or the message."""
        self.overwritten: list[tuple[_ResultMetric, Any]] = []
        """The logged values that the current batch has changed, each with its value before."""
        self._read_dicts: set[str] = set()  # which of the three dicts the current batch has read
        self._is_outdated = False  # whether a batch ended since the dicts were brought up to date

    def begin_batch(self, results: _ResultCollection, batch: Any, dataloader_idx: int | None = None) -> None:
        """Begins a batch as Lightning's `on_batch_start` does, for a loop that knows its results."""
        self._first_loop_iter = self._first_loop_iter is None
        results.batch = batch
        results.batch_size = None
        results.dataloader_idx = dataloader_idx
        self.results = results

    def end_batch(self) -> None:
        """Ends a batch."""
        results, self.results = self.results, None
        assert results is not None
        results.batch = results.batch_size = None
        self.overwritten.clear()
        self._read_dicts.clear()
        self._is_outdated = True

    def collect(self) -> None:
        """Updates the three dicts of metrics with the last batch that has ended."""
        if self.results is not None:  # the current batch was cancelled, or has raised
            for item, value in reversed(self.overwritten):
                item._forward_cache = value
        if self._is_outdated and self.trainer._results:
            metrics = self.metrics
            if "pbar" not in self._read_dicts:
                self._progress_bar_metrics.update(metrics["pbar"])
            if "callback" not in self._read_dicts:
                self._callback_metrics.update(metrics["callback"])
            if "log" not in self._read_dicts:
                self._logged_metrics.update(metrics["log"])
        if self.results is not None:
            self.end_batch()
        self._is_outdated = False

    def epoch_end_reached(self) -> None:
        """Called by Lightning when the values of the last step are no longer current."""
        self.collect()
        super().epoch_end_reached()
        if self.trainer.training:  # an evaluation reduces after each of its loaders
            self.synchronise()

    def on_epoch_end(self) -> None:
        """Called by Lightning after the hooks of that name, which may have logged values, too."""
        self.synchronise()
        super().on_epoch_end()

    def synchronise(self) -> None:
        """Reduces values logged with `sync_dist` over the ranks; a rank that has logged nothing takes part, too."""
        if self.trainer.training or self.all_ranks_reach_end:
            self._reduce()

    @property
    def _is_single_rank(self) -> bool:
        return self.trainer.data_ranks.size == 1  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        trainer: Any = self.trainer
        results, padding = trainer._results, None if trainer.training else self.padding
        if results is None or self._is_single_rank or trainer.barebones:
            return
        reduce_results(
            results,
            trainer.lightning_module,
            trainer.data_ranks,
            is_idle=padding is not None and padding.is_idle(results.dataloader_idx),
            names_of_fillers=self.names_of_fillers,
        )

    def reset_results(self) -> None:
        """Called by Lightning at the start and the end of an epoch or evaluation."""
        super().reset_results()
        # Lightning: the names begin with that of the hook; a validation begins and ends within an epoch of training.
        in_training = self.trainer.training
        self.names_of_fillers = {n for n in self.names_of_fillers if n.startswith("training_step.") != in_training}

    def teardown(self) -> None:
        """Called by Lightning at the end of a run, also of an interrupted one."""
        self.collect()
        super().teardown()

    @property
    def metrics(self) -> _METRICS:
        """The metrics of the batch or of the epoch; the progress bar's are still tensors."""
        # Lightning: _ResultCollection.metrics, which reads the progress bar's from the device at once.
        on_step = self._first_loop_iter is not None
        results = self.trainer._results
        assert results is not None
        if not on_step and not self._is_single_rank and has_unreduced(results):
            self._reduce()  # read in the hook that logged it
        metrics = _METRICS(callback={}, log={}, pbar={})
        for _, item in results.valid_items():
            meta = item.meta
            if on_step and not meta.on_step:
                continue
            value = results._get_cache(item, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked_name = results._forked_name(item, on_step)
            if meta.logger:
                metrics["log"][forked_name] = value
            if results.training or (meta.on_epoch and not on_step):
                metrics["callback"][name] = value
                metrics["callback"][forked_name] = value
            if meta.prog_bar:
                metrics["pbar"][forked_name] = value  # type: ignore[assignment]
        return metrics

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The current values of the metrics for callbacks."""
        self._note_read("callback")
        return super().callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The current values of the metrics for loggers."""
        self._note_read("log")
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The progress bar's metrics as numbers, read from the device together."""
        self._note_read("pbar")
        metrics = super().progress_bar_metrics
        if self.results is not None and any(is_asynchronous(value) for value in metrics.values()):
            self._count_read()
        return as_numbers(metrics)

    def _note_read(self, metrics: str) -> None:
        if self.results is not None:
            self._read_dicts.add(metrics)

    def _count_read(self) -> None:
        """Warns once if the host waits for the device between two logging intervals, step after step."""
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        if step == self._read_step or self.should_update_logs:
            return
        self._num_reads = self._num_reads + 1 if step == self._read_step + 1 else 1
        self._read_step = step
        if self._num_reads == _MIN_READS and _READ_WARNING not in self.issued_warnings:
            self.issued_warnings.add(_READ_WARNING)
            log.warning(_READ_WARNING, _calling_callback())

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Sends `metrics` to the loggers; tensors of a device are read together."""
        # Lightning: _LoggerConnector.log_metrics, which reads one after the other.
        if not self.trainer.loggers or not metrics:
            return
        self._logged_metrics.update(metrics)
        numbers = convert_tensors_to_scalars(as_numbers(metrics))  # which raises Lightning's error about other tensors
        if step is None:
            step = numbers.pop("step", None)
            if step is None:
                numbers.setdefault("epoch", self.trainer.current_epoch)
                step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            step = int(step)
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=numbers, step=step)
            logger.save()
            self.trainer._checkpoint_connector.logs.note(logger, numbers, step)  # type: ignore[attr-defined]


def _calling_callback() -> str:
    """Returns the name of the class of the callback that is being called."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Callback):
        frame = frame.f_back
    return "A callback" if frame is None else type(frame.f_locals["self"]).__name__
