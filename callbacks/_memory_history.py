"""Writes a snapshot of CUDA's memory when it runs out."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MemoryHistory"]

_NUM_EVENTS = 100_000
"""Number of the last allocations and frees that are kept."""


class MemoryHistory:
    """Keeps the last allocations with their stacks, and writes them when memory runs out.

    torch: torch.cuda.memory._record_memory_history and _dump_snapshot, and the observer of its allocator,
    torch._C._cuda_attach_out_of_memory_observer, which is called before the error is raised, even if it is caught.

    Args:
        device: the CUDA device.
        path: returns the path of the next file.
    """

    def __init__(self, device: torch.device, path: Callable[[], str]) -> None:
        self._device, self._path, self._is_on = device, path, True
        self.written: list[str] = []
        torch.cuda.memory._record_memory_history(max_entries=_NUM_EVENTS, device=device)
        # Only builds with CUDA have this function; torch keeps the observer until the process ends.
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
        attach(self._write)

    def _write(self, device: int, requested: int, total: int, free: int) -> None:
        if self._is_on:
            path = self._path()
            torch.cuda.memory._dump_snapshot(path)
            self.written.append(path)

    def end(self) -> None:
        """Stops recording."""
        if self._is_on:
            self._is_on = False
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
