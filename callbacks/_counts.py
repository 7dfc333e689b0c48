"""Counts the samples and tokens of a batch without reading from the device."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_samples", "count_tokens"]

# No 8-bit types: those are images more often than tokens.
_TOKEN_TYPES = (torch.int64, torch.int32, torch.int16)


def count_samples(batch: Any) -> int:
    """The length of the first tensor in a batch (nested mappings, sequences and dataclasses); 1 if it is 0-d.

    Lightning's `extract_batch_size` walks the whole batch and warns where lengths differ; the first is enough here.

    Raises:
        ValueError: there is no tensor in it.
    """
    for tensor in _tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise ValueError(
        f"The number of samples of a batch of type {type(batch).__name__} is not known: it holds no tensor."
        " Say how to count with ThroughputMonitor(num_samples=...), a function from a batch to an int."
    )


def count_tokens(batch: Any) -> int | Tensor | None:
    """Tokens of a batch: the sum of an ``attention_mask``, else the size of its first integer tensor of 2 dims or more.

    Returns:
        A 0-d tensor on the mask's device, or an int; None where there is neither.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].sum(dtype=torch.int64)  # in bf16 a sum stops being exact at 256
    return next((t.numel() for t in _tensors(batch) if t.dtype in _TOKEN_TYPES and t.dim() >= 2), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))
