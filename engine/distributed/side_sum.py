"""Adds a few numbers up over the ranks while an accelerator computes something else.

An all-reduce on the stream that computes would have it wait for the slowest rank, and for all collectives of the group
that were launched before. This one has a stream and a connection of its own.

Communication: one all-reduce for each call, of the bytes of what is added up.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import module_of

__all__ = ["SideSum"]


class SideSum:
    """Sums over a group of ranks.

    Args:
        group: whose ranks all create this at the same time; None for all ranks.
        device: an accelerator with streams.
        timeout: of the sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = self._module.Stream(device=device)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def begin(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins a sum; call what is returned for it, on the stream that is to use it.

        Args:
            make: returns what this rank has, a tensor that nobody else uses.
            needs_device: whether that is computed from what the device is still computing.
        """
        if needs_device:
            total = make()
            self._stream.wait_stream(self._current())
            total.record_stream(self._stream)
        with self._module.stream(self._stream):
            if not needs_device:
                total = make()
            dist.all_reduce(total, group=self._group)

        def end() -> Tensor:
            self._current().wait_stream(self._stream)
            total.record_stream(self._current())
            return total

        return end

    def _current(self) -> Any:
        return self._module.current_stream(self._device)
