"""A batch cut into micro-batches of equal size, and what was made of them put together again."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["batch_size_of", "merged", "split_batch"]


def batch_size_of(batch: Any) -> int:
    """Number of samples: the first dim of the first tensor that has dims.

    Raises:
        ValueError: there is none.
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.append(tensor.shape[0]) if tensor.dim() else None)
    if not sizes:
        raise ValueError(
            f"a pipeline cuts each batch into micro-batches, but there is no tensor in this {type(batch).__name__}:"
            " have the DataLoader yield tensors, or dicts, lists or dataclasses of them, with the samples in dim 0."
        )
    return sizes[0]


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cuts every tensor of `batch`, and lists of as many values, along the samples; all else goes into each part.

    Raises:
        ValueError: a tensor has another number of rows than there are samples.
    """
    if num_parts == 1:
        return [batch]
    size = batch_size_of(batch)
    return [_part(batch, size, size // num_parts, index) for index in range(num_parts)]


def _part(batch: Any, size: int, width: int, index: int) -> Any:
    rows = slice(index * width, (index + 1) * width)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if tensor.shape[0] != size:
            raise ValueError(
                f"a pipeline cuts each batch of {size} samples into micro-batches, but it has a tensor"
                f" {list(tensor.shape)}: have the DataLoader yield tensors with the samples in dim 0, or set"
                " microbatches=1."
            )
        return tensor[rows]

    def visit(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == size and all(map(_is_plain, value)):
            return value[rows]  # a text for each sample, say
        if type(value) in (list, tuple):
            return type(value)(visit(each) for each in value)
        if type(value) is dict:
            return {key: visit(each) for key, each in value.items()}
        return apply_to_collection(value, Tensor, cut)

    return visit(batch)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float, bool))


def merged(outputs: list[Any]) -> Any:
    """What a step returned for each micro-batch as one: samples behind each other, means of scalars."""
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.stack(outputs).mean(0) if first.dim() == 0 and first.is_floating_point() else _rows(outputs)
    if isinstance(first, Mapping):
        return type(first)({key: merged([output[key] for output in outputs]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) or (isinstance(first, list) and all(isinstance(value, Tensor) for value in first)):
        parts = [merged(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, list):
        return [value for output in outputs for value in output]  # one for each sample, say
    return sum(outputs) / len(outputs) if isinstance(first, float) else first


def _rows(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)
