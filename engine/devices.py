"""Accelerators of any maker: torch has a module for each kind, such as `torch.cuda` and `torch.xpu`."""

import resource
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "allocated_bytes",
    "capacity_bytes",
    "host_peak_bytes",
    "in_use",
    "memory_stats",
    "module_of",
    "multiply",
    "peak_bytes",
    "reset_peak",
    "wait_for",
]


def module_of(device: torch.device) -> Any:
    """Torch's module for the kind of `device`; None for the CPU, and for a kind without such a module."""
    if device.type == "cpu":
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def in_use() -> tuple[str, Any] | None:
    """The kind of this process's accelerator, and torch's module for it; None if nothing has used one yet."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else module_of(kind)
    if kind is None or module is None:
        return None
    # A query would initialize an unused GPU, which takes memory; some kinds can't be asked whether they are in use.
    is_used = module.is_initialized() if hasattr(module, "is_initialized") else module.is_available()
    return (kind.type, module) if is_used else None


def wait_for(device: torch.device) -> None:
    """Waits until all work that this process has launched on `device` is done."""
    if (module := module_of(device)) is not None:
        module.synchronize()


def peak_bytes(device: torch.device) -> int | None:
    """The peak of allocated memory on `device` since `reset_peak`; None if torch does not count it."""
    module = module_of(device)
    return module.max_memory_allocated(device) if hasattr(module, "max_memory_allocated") else None


_STATUS = Path("/proc/self/status")


def host_peak_bytes() -> int:
    """The peak of this process's memory on the host."""
    try:
        # Not getrusage: its peak starts with the value of the parent process.
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # no /proc: getrusage, in KiB on Linux and in bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def allocated_bytes(device: torch.device) -> int:
    """The memory that tensors have on `device`; 0 if torch does not count it."""
    module = module_of(device)
    return module.memory_allocated(device) if hasattr(module, "memory_allocated") else 0


def capacity_bytes(device: torch.device) -> int | None:
    """The total memory of `device`; None if torch does not report it."""
    module = module_of(device)
    return module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else None


def memory_stats(device: torch.device) -> dict[str, int]:
    """The counts of torch's allocator on `device`, by the names of `torch.cuda.memory_stats`; empty without them."""
    module = module_of(device)
    return dict(module.memory_stats(device)) if hasattr(module, "memory_stats") else {}


def reset_peak(device: torch.device) -> None:
    """Starts the measurement of `peak_bytes` anew."""
    module = module_of(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def multiply(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiplies tensors in place by a number or a 0-d tensor; they may be on different devices."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device].append(tensor)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device) if isinstance(factor, Tensor) else factor)
