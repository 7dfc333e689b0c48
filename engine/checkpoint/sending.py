"""Nested values on their way from one rank to another: tensors as their bytes, which pickle copies once.

As they are, each would be written by `torch.save` within the pickle.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tree import is_plain, mapped

__all__ = ["packed", "unpacked"]


class _Packed(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Any


def packed(value: Any) -> Any:
    """A nested value whose tensors are in host memory, and read by `unpacked` only."""
    return mapped(_pack, value)


def _pack(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if not is_plain(tensor):
        return tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return _Packed(tensor.dtype, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).numpy())


def unpacked(value: Any) -> Any:
    """Returns the value that `packed` was given."""
    return mapped(_unpack, value, _Packed)


def _unpack(tensor: _Packed) -> Tensor:
    content = np.require(tensor.content, requirements="W")
    return torch.from_numpy(content).view(tensor.dtype).reshape(tensor.shape)
