"""`MemoryMonitor`: how much memory the ranks use."""

import os
import resource
import sys
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from ._interval import IntervalCallback

__all__ = ["MemoryMonitor"]


class MemoryMonitor(IntervalCallback):
    """Logs `memory/min_mb`, `memory/mean_mb` and `memory/max_mb` over the ranks, in units of 10^6 bytes.

    On CUDA it is the most that was allocated on the device since the last measurement; on other devices the memory of
    the process that is resident now. One all-reduce of a number per rank at each logging step, nothing in between.
    """

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Measures where it is due."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """The figures over all ranks."""
        device = trainer.strategy.root_device
        everyone = torch.zeros(trainer.world_size, dtype=torch.float64, device=device)
        everyone[trainer.global_rank] = _used_bytes(device) / 1e6
        everyone = cast(Tensor, trainer.strategy.reduce(everyone, reduce_op="sum"))
        return {
            "memory/min_mb": everyone.min().item(),
            "memory/mean_mb": everyone.mean().item(),
            "memory/max_mb": everyone.max().item(),
        }


def _used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc outside of Linux: the peak stands in, in KiB there and in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
