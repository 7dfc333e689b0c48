"""Gives values of other pipeline stages the dtypes that autocast would give them.

Autocast ignores tensors on the meta device. So an operation on them returns another dtype than on real tensors, or
fails, since its arguments have different dtypes. torch's fake tensors have no content either, but a real device.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..._compat.torch import FakeTensor, FakeTensorMode, tree_leaves

__all__ = ["autocast_form"]


def autocast_form(func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """Returns the result of an operation on meta tensors, in the dtypes that autocast gives on `device`.

    If autocast changes nothing, the operation runs without it, so that a view stays a view of an argument.
    """
    mode = FakeTensorMode()

    def fake(tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, copy, device) if tensor.is_meta else tensor

    with mode:
        cast = func(*apply_to_collection(args, Tensor, fake), **apply_to_collection(kwargs, Tensor, fake))
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # its arguments have different dtypes
        result = None
    if _dtypes(result) == _dtypes(cast):
        return result
    return apply_to_collection(
        cast, Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )


def _dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
