"""`RunSummary`: describes a run in one line at the start, and its results in a few lines at the end."""

import sys
from time import perf_counter
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from polyphase.engine.run_info import header

from ._counts import count_samples
from ._memory import peak_bytes
from ._run_text import RunEnd, end_text, stop_text
from .doctor import Doctor
from .memory import MemoryMonitor
from .throughput import ThroughputMonitor
from .trace_profiler import TraceProfiler

__all__ = ["RunSummary"]


class _Figures(NamedTuple):
    """The figures that a rank has counted during training."""

    num_samples: int | None
    waited_s: float | None
    peak_bytes: int


class RunSummary(Callback):
    """Prints one line when training begins, and about eight lines when it ends; rank 0 only.

    The engine adds it; see its argument `enable_run_summary`. The first line has the version, strategy and layout,
    precision, the global batch as ranks x micro-batch x accumulated micro-batches, and the folder of the logs. The
    lines at the end have:

    - optimizer steps, and samples/s over all ranks for the time of training without validation; samples shared by
      several ranks count once, and no samples are printed if a batch does not show how many it has;
    - the share of that time in which the ranks waited for their data loaders, mean over ranks;
    - the largest peak memory of a rank since its process began: memory that torch allocated on the device, or resident
      memory on the CPU;
    - the best checkpoint and its value, the folders of logs and checkpoints, how to continue, and how to load the
      weights;
    - with a `Doctor` among the callbacks, where the time went, and its most expensive cause.

    After Ctrl-C and SIGTERM it prints what was saved, and how to continue. The counts are sent once, when training is
    over. The host waits for the device only then, and before and after each validation.
    """

    def __init__(self) -> None:
        self._figures: list[_Figures] | None = None
        self._began = False
        self._started: float | None = None
        self._elapsed_s = 0.0

    @property
    def num_samples(self) -> int | None:
        """Number of this rank's samples since training began; None if a batch does not show how many it has."""
        return self._num_samples

    # --- while training

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prints the line, and starts the clock."""
        if trainer.is_global_zero:
            _say(header(trainer))
        self._figures = None
        self._first_step = trainer.global_step
        self._waited_s = trainer.data_wait_s
        monitors = [c for c in trainer.callbacks if isinstance(c, ThroughputMonitor)]
        self._count = monitors[0].count_samples if monitors else count_samples
        self._num_samples: int | None = 0
        self._has_fillers = trainer.data_size > 1
        self._elapsed_s = 0.0
        self._began = True
        self._started = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch's samples, without reading from the device."""
        if self._num_samples is None or batch is None or (self._has_fillers and trainer.is_filler(batch_idx)):
            return
        try:
            self._num_samples += self._count(batch)
        except ValueError:  # a batch that does not show its number of samples
            self._num_samples = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._stop_clock(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues the clock."""
        if self._began:
            _wait_for_device(trainer)
            self._started = perf_counter()

    def _stop_clock(self, trainer: Trainer) -> None:
        if self._started is not None:
            _wait_for_device(trainer)
            self._elapsed_s += perf_counter() - self._started
            self._started = None

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gathers the counts of all ranks: one gather of three numbers."""
        self._stop_clock(trainer)
        waited = None if None in (trainer.data_wait_s, self._waited_s) else trainer.data_wait_s - self._waited_s
        peak = max([peak_bytes(trainer.strategy.root_device), *_monitored_peaks(trainer)])
        self._figures = trainer.all_ranks.all_gather_object(_Figures(self._num_samples, waited, peak))

    # --- when it is over

    def on_run_end(self, trainer: Any, pl_module: LightningModule, exception: BaseException | None) -> None:
        """Prints the final lines; called by the engine after all saves and all other hooks."""
        figures, began = self._figures, self._began
        self._figures, self._began, self._started = None, False, None
        if not began or not trainer.is_global_zero:
            return
        if isinstance(exception, (KeyboardInterrupt, SIGTERMException)):
            cause = "Ctrl-C" if isinstance(exception, KeyboardInterrupt) else "SIGTERM"
            _say(*stop_text(trainer, cause))
        elif exception is None and figures is not None:
            verdict = [
                line for c in trainer.callbacks if isinstance(c, (Doctor, TraceProfiler)) for line in c.summary()
            ]
            _say(*end_text(trainer, self._end(trainer, figures)), *verdict)

    def _end(self, trainer: Any, figures: list[_Figures]) -> RunEnd:
        counts = [rank.num_samples for rank in figures]
        waits = [rank.waited_s for rank in figures]
        # Ranks that share batches count as one replica of the data.
        sharing = trainer.world_size // trainer.data_size
        elapsed_s = max(self._elapsed_s, 1e-9)
        return RunEnd(
            num_steps=trainer.global_step - self._first_step,
            elapsed_s=elapsed_s,
            samples_per_s=None if None in counts else sum(filter(None, counts)) / sharing / elapsed_s,
            data_wait_share=None if None in waits else sum(filter(None, waits)) / len(waits) / elapsed_s,
            peak_bytes=max(rank.peak_bytes for rank in figures),
        )


def _say(*lines: str) -> None:
    # Not with print(), which programs and tests replace to capture the module's own output.
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _wait_for_device(trainer: Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)


def _monitored_peaks(trainer: Any) -> list[int]:
    """Returns the peaks that each `MemoryMonitor` measured before it reset torch's counter."""
    return [c.largest_bytes for c in trainer.callbacks if isinstance(c, MemoryMonitor)]
