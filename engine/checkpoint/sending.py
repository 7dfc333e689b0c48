"""Packs nested values to send them from one rank to another; tensors are packed as bytes, which pickle copies once.

Otherwise pickle would write each tensor with `torch.save` inside the pickle.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .state_tree import is_plain, mapped

__all__ = ["packed", "unpacked"]


class _Packed(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Any


def packed(value: Any) -> Any:
    """Returns a nested value with its tensors as bytes; `unpacked` restores it."""
    return mapped(_pack, value)


def _pack(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if not is_plain(tensor):
        return tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return _Packed(tensor.dtype, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).numpy())


def unpacked(value: Any) -> Any:
    """Restores a value from `packed`."""
    return mapped(_unpack, value, _Packed)


def _unpack(tensor: _Packed) -> Tensor:
    content = np.require(tensor.content, requirements="W")
    return torch.from_numpy(content).view(tensor.dtype).reshape(tensor.shape)
