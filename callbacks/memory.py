"""`MemoryMonitor`: logs the memory that the ranks use."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from polyphase.engine.devices import host_peak_bytes, peak_bytes, reset_peak

from ._interval import IntervalCallback, sum_over_ranks

__all__ = ["MemoryMonitor"]

_STATM = Path("/proc/self/statm")


class MemoryMonitor(IntervalCallback):
    """Logs `memory/min_mb`, `memory/mean_mb` and `memory/max_mb` over the ranks, in units of 10^6 bytes.

    On CUDA this is the peak of allocated memory since the last measurement, which resets torch's peak counter. On other
    devices it is the current resident memory of the process, or its peak if there is no ``/proc``. Each logging step
    needs one all-reduce of one number per rank; other steps have no communication.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.
    """

    largest_bytes = 0
    """The largest value that this rank has measured."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval, which excludes earlier allocations."""
        super().on_train_start(trainer, pl_module)
        reset_peak(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Measures if the interval ends here."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns the figures over all ranks."""
        # A sum in which each rank fills its own entry is an all-gather, and every strategy has `reduce`.
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
    except OSError:  # no /proc
        return host_peak_bytes()
