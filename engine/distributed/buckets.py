"""Buckets: tensors that are sent together, as one flat tensor."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["copy", "flatten", "in_buckets", "unflatten"]


def in_buckets(tensors: Iterable[Tensor], largest_mb: float) -> Iterator[list[Tensor]]:
    """Yields buckets: tensors of one dtype, in their order, of at most `largest_mb` MiB, or a single larger tensor."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for of_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in of_dtype:
            if bucket and num_bytes + tensor.nbytes > largest_mb * 2**20:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        yield bucket


def flatten(tensors: list[Tensor]) -> Tensor:
    """Returns a copy of `tensors` as one 1-d tensor, each flattened, in their order."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Returns views of `flat` in the shapes of `tensors`; the inverse of `flatten`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [view.view(tensor.shape) for view, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def copy(values: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies `values` into `tensors`, which may be parameters."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
