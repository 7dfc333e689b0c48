"""Peak memory of this process, on its device or on the host."""

import resource
import sys
from pathlib import Path

import torch

from polyphase.engine import devices

__all__ = ["peak_bytes"]

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """Returns the peak of torch's allocated bytes on `device`; where it counts none, the process's peak on the host."""
    if (peak := devices.peak_bytes(device)) is not None:
        return peak
    try:
        # Not getrusage: its peak starts with the value of the parent process.
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # no /proc: getrusage, in KiB on Linux and in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
