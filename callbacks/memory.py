"""`MemoryMonitor`: how much memory the ranks use."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from polyphase.engine.devices import peak_bytes, reset_peak

from ._interval import IntervalCallback, sum_over_ranks

__all__ = ["MemoryMonitor"]

_STATM = Path("/proc/self/statm")


class MemoryMonitor(IntervalCallback):
    """Logs `memory/min_mb`, `memory/mean_mb` and `memory/max_mb` over the ranks, in units of 10^6 bytes.

    On CUDA it is the most that was allocated on the device since the last measurement (torch's peak counter is reset by
    it); on other devices the memory of the process that is resident now, or its peak where there is no ``/proc``.
    One all-reduce of a number per rank at each logging step, nothing in between.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.
    """

    largest_bytes = 0
    """The most that one measurement of this rank has found."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval: what was allocated to get here is not of it."""
        super().on_train_start(trainer, pl_module)
        reset_peak(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Measures where it is due."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """The figures over all ranks."""
        # A sum in which each rank fills its own place is an all-gather, and every strategy has `reduce`.
        places_mb = [0.0] * trainer.world_size
        used_bytes = _used_bytes(trainer.strategy.root_device)
        self.largest_bytes = max(self.largest_bytes, used_bytes)
        places_mb[trainer.global_rank] = used_bytes / 1e6
        ranks_mb = sum_over_ranks(trainer, places_mb)
        return {
            "memory/min_mb": min(ranks_mb),
            "memory/mean_mb": sum(ranks_mb) / len(ranks_mb),
            "memory/max_mb": max(ranks_mb),
        }


def _used_bytes(device: torch.device) -> int:
    if (allocated := peak_bytes(device)) is not None:
        reset_peak(device)
        return allocated
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc outside of Linux: the peak stands in, in KiB there and in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
