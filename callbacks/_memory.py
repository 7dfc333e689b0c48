"""The most memory that this process has had, on its device or in all."""

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_bytes"]

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """Bytes that torch has allocated on `device` at most; on the CPU, bytes of the process that were resident."""
    if device.type != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated(device)
    try:
        # Not getrusage's figure, which a process begins with its parent's.
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # no /proc outside of Linux: KiB there, bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
