"""Tensors that travel together."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["copy", "flatten", "in_buckets", "unflatten"]


def in_buckets(tensors: Iterable[Tensor], largest_mb: float) -> Iterator[list[Tensor]]:
    """Runs of `tensors` of one dtype that take at most `largest_mb` MiB together, or are one tensor."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for kind in kinds.values():
        run: list[Tensor] = []
        for tensor in kind:
            if run and sum(packed.nbytes for packed in run) + tensor.nbytes > largest_mb * 2**20:
                yield run
                run = []
            run.append(tensor)
        yield run


def flatten(tensors: list[Tensor]) -> Tensor:
    """One behind the other, as one flat copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The opposite of `flatten`: views of `flat` in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def copy(values: list[Tensor], tensors: list[Tensor]) -> None:
    """Gives `tensors`, parameters or not, these values."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
