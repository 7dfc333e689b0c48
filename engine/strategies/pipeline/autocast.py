"""The dtypes that autocast gives to values that another pipeline stage has.

Autocast leaves tensors on the meta device alone, so an operation on them returns another dtype than where they have
content, or fails since its arguments differ. torch's fake tensors have no content either, but are of a real device.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch: private, as torch.compile uses it
from torch.utils._pytree import tree_leaves

__all__ = ["autocast_form"]


def autocast_form(func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """The result of an operation on meta tensors, of the dtypes that autocast gives it on `device`.

    Autocast is left out where it changes nothing: then a view in the result is one of the arguments.
    """
    mode = FakeTensorMode()

    def fake(tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, copy, device) if tensor.is_meta else tensor

    with mode:
        cast = func(*apply_to_collection(args, Tensor, fake), **apply_to_collection(kwargs, Tensor, fake))
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # of different dtypes
        result = None
    if _dtypes(result) == _dtypes(cast):
        return result
    return apply_to_collection(
        cast, Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )


def _dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
