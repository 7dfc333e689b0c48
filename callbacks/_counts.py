"""Counts the tokens of a batch without reading from the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyphase.engine.data.samples import tensors_in

__all__ = ["count_tokens", "num_places"]

# 8-bit integers are excluded: they are more often images than tokens.
_TOKEN_TYPES = (torch.int64, torch.int32, torch.int16)


def count_tokens(batch: Any) -> int | Tensor | None:
    """Counts the tokens of a batch: sum of ``attention_mask``, else size of the first integer tensor with >= 2 dims.

    Returns:
        A 0-d tensor on the mask's device, or an int; None if the batch has neither.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].sum(dtype=torch.int64)  # in bf16 a sum stops being exact at 256
    return next((t.numel() for t in tensors_in(batch) if t.dtype in _TOKEN_TYPES and t.dim() >= 2), None)


def num_places(batch: Any) -> int | None:
    """Counts the tokens of a batch including padding, without reading a mask; None if it has no tokens."""
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].numel()
    return next((t.numel() for t in tensors_in(batch) if t.dtype in _TOKEN_TYPES and t.dim() >= 2), None)
