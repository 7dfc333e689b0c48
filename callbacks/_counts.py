"""Counts the samples and tokens of a batch without reading from the device."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_samples", "count_tokens", "num_places"]

# 8-bit integers are excluded: they are more often images than tokens.
_TOKEN_TYPES = (torch.int64, torch.int32, torch.int16)


def count_samples(batch: Any) -> int:
    """Returns the length of the first tensor in a batch (nested mappings, sequences, dataclasses); 1 for a 0-d tensor.

    Lightning's `extract_batch_size` walks the whole batch and warns if lengths differ; the first tensor is enough here.

    Raises:
        ValueError: the batch has no tensor.
    """
    first = batch
    if type(batch) is list or type(batch) is tuple:  # the usual types need no walk
        first = batch[0] if batch else None
    elif type(batch) is dict:
        first = next(iter(batch.values()), None)
    for tensor in (first,) if isinstance(first, Tensor) else _tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise ValueError(
        f"The number of samples of a batch of type {type(batch).__name__} is not known: it holds no tensor."
        " Pass ThroughputMonitor(num_samples=...), a function from a batch to an int."
    )


def count_tokens(batch: Any) -> int | Tensor | None:
    """Counts the tokens of a batch: sum of ``attention_mask``, else size of the first integer tensor with >= 2 dims.

    Returns:
        A 0-d tensor on the mask's device, or an int; None if the batch has neither.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].sum(dtype=torch.int64)  # in bf16 a sum stops being exact at 256
    return next((t.numel() for t in _tensors(batch) if t.dtype in _TOKEN_TYPES and t.dim() >= 2), None)


def num_places(batch: Any) -> int | None:
    """Counts the tokens of a batch including padding, without reading a mask; None if it has no tokens."""
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].numel()
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
