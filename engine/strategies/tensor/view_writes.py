"""Refuses writes into a view of a split tensor that torch has gathered: they would be lost.

In one process `x.select(1, 0).fill_(1)` writes into `x`. If `x` is split along that dim, torch selects from a gathered
copy, and `x` stays as it is. A region of which a write is refused is replicated, see `styles.py`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..._compat.torch import AsyncCollectiveTensor, tree_leaves
from ..whole_steps import GATHERED

__all__ = ["NoLostWrites"]

_VIEWS = {
    *("__getitem__", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind"),
    *("diagonal", "view", "reshape", "flatten", "unflatten", "swapaxes", "movedim", "transpose", "permute"),
}
"""Functions and methods that return views of their first argument."""


class NoLostWrites(TorchFunctionMode):
    """A mode of a step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each function and method."""
        name = getattr(func, "__name__", "")
        tensor = args[0] if args else None
        if not isinstance(tensor, DTensor):
            return func(*args, **(kwargs or {}))
        if GATHERED in vars(tensor) and _writes(name):
            raise RuntimeError(
                f"{name} writes into a part of a tensor of shape {tuple(tensor.shape)} that is split over ranks, of"
                " which it has a gathered copy: the write would be lost. Write by an index, as in `x[:, 0] = values`."
            )
        result = func(*args, **(kwargs or {}))
        if name in _VIEWS and not (name == "__getitem__" and _copies(args[1])):
            for view in _views(result):
                if GATHERED in vars(tensor) or not _share_memory(tensor, view):
                    vars(view)[GATHERED] = True
        return result


def _writes(name: str) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
    return is_in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__"))


def _copies(index: Any) -> bool:
    """Whether indexing returns a copy in one process, too."""
    indices = index if isinstance(index, tuple) else (index,)
    return not all(entry is None or entry is ... or isinstance(entry, (int, slice)) for entry in indices)


def _views(result: Any) -> Iterator[DTensor]:
    for leaf in tree_leaves(result):
        if isinstance(leaf, DTensor):
            yield leaf


def _share_memory(one: DTensor, other: DTensor) -> bool:
    # torch: DTensor._local_tensor
    parts: list[Any] = [one._local_tensor, other._local_tensor]
    # torch: what a collective will give has no storage of its own, and nor has a view of it.
    of_parts: list[Tensor] = [part.elem if isinstance(part, AsyncCollectiveTensor) else part for part in parts]
    return of_parts[0].untyped_storage().data_ptr() == of_parts[1].untyped_storage().data_ptr()
