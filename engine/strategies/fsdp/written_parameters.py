"""Writes of a hook to sharded parameters and gradients have the effect that they have in one process.

`p.data = values` does not change the rank's part of a DTensor `p` in torch, `p[index] = values` raises an error, and
`p[0].zero_()` changes a gathered copy of the row; here they write. `p.numpy()` is refused: this rank has a shard.

Communication: `p[index] = values` and `p[0].zero_()` gather `p`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from ..._compat.torch import tree_map_only
from ..whole_steps import GATHERED
from .unit_order import WRITE, UnitOrder

__all__ = ["forget_data", "keep_data"]

_data: Any = Tensor.data


class _Part(DTensor):
    """A copy of a part of a sharded tensor, gathered by its index; a write into it in place is written back."""

    # Names that are not attributes of torch's tensors.
    whole_tensor: DTensor
    index_in_whole: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions and methods."""
        with torch._C.DisableTorchFunctionSubclass():  # torch: for implementations of this method
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
            if is_in_place and args and isinstance(args[0], _Part):
                args[0].write_back()
        return result

    def write_back(self) -> None:
        """Writes the present values into the whole tensor."""
        with torch.no_grad():
            self.whole_tensor[self.index_in_whole] = self.full_tensor()


def _get_item(tensor: Any, index: Any) -> Any:
    part: Any = Tensor.__getitem__(tensor, index)
    indices = index if isinstance(index, tuple) else (index,)
    is_view = all(entry is None or entry is ... or isinstance(entry, (int, slice)) for entry in indices)
    # Activations are no leaves; parameters and gradients are.
    if is_view and tensor.is_leaf and type(part) is DTensor and not _share_memory(tensor, part):
        written_back: Any = part
        written_back.__class__ = _Part
        written_back.whole_tensor, written_back.index_in_whole = tensor, index
        vars(written_back).pop(GATHERED, None)
    return part


def _share_memory(one: DTensor, other: DTensor) -> bool:
    storages = [tensor._local_tensor.untyped_storage() for tensor in (one, other)]  # torch: DTensor._local_tensor
    return storages[0].data_ptr() == storages[1].data_ptr()


def keep_data(order: UnitOrder | None, flag: str) -> None:
    """Makes these writes take effect, and refuses arrays, until `forget_data`.

    Args:
        order: checks that all ranks write parts in the same order; None: no check.
        flag: the strategy's, for messages.
    """

    def set_item(tensor: Any, index: Any, values: Any) -> None:
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise RuntimeError(f"under {flag} a part of a tensor that is a sum over ranks can't be written: reduce it.")
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # as torch
        if order is not None:
            order.check(WRITE)
        with torch.no_grad():
            whole = tensor.full_tensor().clone()
            index, values = tree_map_only(DTensor, lambda other: other.full_tensor(), (index, values))
            whole[index] = values
            # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
            tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
            if isinstance(tensor, _Part):
                tensor.write_back()

    def numpy(tensor: Any, **unused: Any) -> Any:
        raise RuntimeError(
            f"under {flag} a NumPy array of a parameter or gradient of shape {tuple(tensor.shape)} is refused: this"
            " rank has a shard of it. Call `full_tensor()` on all ranks, and `numpy()` of that copy; write with torch's"
            " own operations, such as `clamp_`; or choose strategy 'ddp'."
        )

    def array(tensor: Any, *unused: Any, **also_unused: Any) -> Any:
        return numpy(tensor)

    def deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
        # torch: Tensor.__deepcopy__ takes a gradient's offset in its bucket for an address, and copies no memory.
        if isinstance(tensor, nn.Parameter) or not tensor.is_leaf:
            return Tensor.__deepcopy__(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.clone()
        return memo[id(tensor)]

    replaced: dict[str, Any] = {
        "__deepcopy__": deep_copy,
        "data": property(_data.__get__, _set),
        "__getitem__": _get_item,
        "__setitem__": set_item,
        "numpy": numpy,
        "__array__": array,
    }
    for name, attribute in replaced.items():
        setattr(DTensor, name, attribute)


def forget_data() -> None:
    """Restores torch's attributes."""
    for name in ("data", "__deepcopy__", "__getitem__", "__setitem__", "numpy", "__array__"):
        if name in vars(DTensor):
            delattr(DTensor, name)


def _set(tensor: Any, value: Any) -> None:
    if isinstance(value, DTensor) and (value.shape, value.dtype, value.device) == (
        tensor.shape, tensor.dtype, tensor.device,
    ):  # fmt: skip
        with torch.no_grad():
            tensor.detach().copy_(value)
    else:
        _data.__set__(tensor, value)
