"""Sums of a few numbers over the ranks, while an accelerator computes something else.

An all-reduce on the computing stream would make it wait for the slowest rank, and for all earlier collectives of the
group. These sums have a stream and a process group of their own.

Communication: one all-reduce for each call, of the bytes of the tensor.
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
        group: all of its ranks create this object at the same time; None for all ranks.
        device: an accelerator with streams.
        timeout: timeout of the process group of the sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = self._module.Stream(device=device)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def begin(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins a sum.

        Args:
            make: returns this rank's summand, a tensor that nothing else uses.
            needs_device: whether the summand depends on work that the device has not finished.

        Returns:
            A function that returns the sum, to be called on the stream that uses it.
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
