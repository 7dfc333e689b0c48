"""The share of padding in batches by their ``attention_mask``; counted on the device, and read one interval later."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyphase.engine.devices import module_of

__all__ = ["PaddingWatch"]

_EVERY_BATCHES = 16


class PaddingWatch:
    """Measures every sixteenth batch.

    Args:
        device: the device of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: list[Tensor] = []
        self._num_tokens = 0
        self._copied: tuple[Tensor, int, int, Any] | None = None

    def look(self, batch: Any, number: int) -> None:
        """Counts the tokens of the `number`-th batch, if that is one to measure."""
        if number % _EVERY_BATCHES == 1 and isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor):
                self._sums.append((mask != 0).sum())
                self._num_tokens += mask.numel()

    def take(self) -> tuple[float, int] | tuple[None, None]:
        """Returns the share of padding, 0 to 1, and the number of batches that were measured; None if unknown.

        They cover the time since the last call; on accelerators, the interval before it.
        """
        sums, num_tokens, before = self._sums, self._num_tokens, self._copied
        self._sums, self._num_tokens, self._copied = [], 0, None
        module = module_of(self._device)
        if sums and module is not None and hasattr(module, "Event"):
            event = module.Event()
            copy = torch.empty((), dtype=torch.int64, pin_memory=True)
            copy.copy_(torch.stack(sums).sum(), non_blocking=True)
            event.record()
            self._copied = copy, num_tokens, len(sums), event
        elif sums:
            before = torch.stack(sums).sum(), num_tokens, len(sums), None
        if before is None or (before[3] is not None and not before[3].query()):
            return None, None
        return 1.0 - float(before[0]) / before[1], before[2]
