"""Cuts batches into micro-batches of equal size, and merges the outputs of a step for them."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["batch_size_of", "merge_outputs", "split_batch", "take_rows"]


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples: the size of the first dim of the first tensor that has dims.

    Raises:
        ValueError: the batch has no such tensor.
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.append(tensor.shape[0]) if tensor.dim() else None)
    if not sizes:
        raise ValueError(
            f"a pipeline cuts each batch into micro-batches, but there is no tensor in this {type(batch).__name__}:"
            " let the DataLoader yield tensors, or dicts, lists or dataclasses of them, with the samples in dim 0."
        )
    return sizes[0]


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cuts tensors, arrays, and lists with one value for each sample, in any nesting, into `num_parts` batches.

    Every other value goes into each part as it is: tensors without dims, tuples of plain values with another length,
    and objects without tensors.

    Raises:
        ValueError: a tensor, array or list has another length than the number of samples, or an object has tensors
            that can't be cut.
    """
    if num_parts == 1:
        return [batch]
    size = batch_size_of(batch)
    width = size // num_parts
    return [_part(batch, size, slice(first, first + width)) for first in range(0, size, width)]


def take_rows(batch: Any, rows: slice) -> Any:
    """Returns some samples of a batch, as `split_batch` cuts them."""
    return _part(batch, batch_size_of(batch), rows)


def _part(value: Any, size: int, rows: slice) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and value.shape[0] != size:
            raise _error(size, f"a tensor {list(value.shape)}")
        return value[rows] if value.ndim else value
    if isinstance(value, (list, tuple)):
        return _row_part(value, size, rows)
    if isinstance(value, Mapping):
        parts = {key: _part(member, size, rows) for key, member in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg]
        mapping = copy.copy(value)  # keeps a default_factory, and other attributes of its class
        mapping.update(parts)
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _part(getattr(value, field.name), size, rows))
        return copied
    if any(isinstance(member, (Tensor, np.ndarray)) for member in getattr(value, "__dict__", {}).values()):
        raise _error(size, f"a {type(value).__name__}, whose tensors it can't cut")
    return value


def _row_part(values: Any, size: int, rows: slice) -> Any:
    """Returns some rows of a list or tuple."""
    if hasattr(values, "_fields"):
        return type(values)(*(_part(value, size, rows) for value in values))
    if not _has_tensors(values):
        if len(values) == size:  # for example a text for each sample
            return values[rows]
        if values and isinstance(values, list):
            raise _error(size, f"a list of {len(values)} values")
        return values
    return type(values)([_part(value, size, rows) for value in values])


def _has_tensors(value: Any) -> bool:
    """Whether there are tensors or arrays in a nested value."""
    tensors: list[Any] = []
    apply_to_collection(value, (Tensor, np.ndarray), tensors.append)
    return bool(tensors)


def _error(size: int, description: str) -> ValueError:
    return ValueError(
        f"a pipeline cuts each batch of {size} samples into micro-batches, but it has {description}: let the DataLoader"
        " yield tensors with the samples in dim 0, lists with one value for each sample, and values that all samples"
        " share without dims or in a tuple, or set microbatches=1 with schedule=gpipe."
    )


def merge_outputs(outputs: list[Any]) -> Any:
    """Merges the outputs of a step for the micro-batches: concatenates samples, takes means of floating scalars."""
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.stack(outputs).mean(0) if first.dim() == 0 and first.is_floating_point() else _rows(outputs)
    if isinstance(first, Mapping):
        return type(first)({key: merge_outputs([output[key] for output in outputs]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) or (isinstance(first, list) and all(isinstance(value, Tensor) for value in first)):
        parts = [merge_outputs(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, list):
        return [value for output in outputs for value in output]  # for example one for each sample
    return sum(outputs) / len(outputs) if isinstance(first, float) else first


def _rows(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)
