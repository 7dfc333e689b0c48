"""Counts the writes into a tensor, with those through its `data`, which torch counts apart from it."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["begin_count", "end_count", "is_counted", "num_writes", "put_values"]

_data: Any = Tensor.data


class _Counted(Tensor):
    # Names that are no attributes of torch's tensors.
    data_views: list[Tensor]
    num_counts: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as any tensor

    @property
    def data(self) -> Tensor:
        """The values, with a number of writes of their own: autograd does not see them."""
        values: Tensor = _data.__get__(self)
        self.data_views.append(values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"a forward replaces the data of a parameter of shape {tuple(self.shape)}, {self.dtype}, by another of"
                f" shape {tuple(value.shape)}, {value.dtype}, which is refused: choose strategy 'ddp', without"
                " activation_checkpointing."
            )
        values = self.data
        with nullcontext() if value.is_meta else torch._C.DisableTorchFunction():  # a mode sees one assignment
            values.copy_(value)


class _CountedParameter(_Counted, nn.Parameter):
    pass


def begin_count(tensor: Tensor) -> int:
    """Returns the number of writes so far; those through `data` count until `end_count`. Counts may be nested."""
    if type(tensor) in (Tensor, nn.Parameter):
        tensor.__class__ = _Counted if type(tensor) is Tensor else _CountedParameter
        tensor.data_views, tensor.num_counts = [], 0  # type: ignore[attr-defined]
    if isinstance(tensor, _Counted):
        tensor.num_counts += 1
    return num_writes(tensor)


def is_counted(tensor: Tensor) -> bool:
    """Whether writes through `data` are counted, too: not those into a subclass such as a DTensor."""
    return isinstance(tensor, _Counted)


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Writes `values` into a tensor, which autograd does not see."""
    _data.__get__(tensor).copy_(values)


def num_writes(tensor: Tensor) -> int:
    """Returns the number of writes into a tensor; 0 for a tensor of inference mode, which torch does not count."""
    views = tensor.data_views if isinstance(tensor, _Counted) else []
    return 0 if tensor.is_inference() else tensor._version + sum(view._version for view in views)


def end_count(tensor: Tensor) -> int:
    """Returns the number of writes; after the outermost count, the tensor is of torch's class again."""
    num = num_writes(tensor)
    if isinstance(tensor, _Counted):
        tensor.num_counts -= 1
        if not tensor.num_counts:
            del tensor.data_views, tensor.num_counts
            kind: Any = nn.Parameter if isinstance(tensor, _CountedParameter) else Tensor
            tensor.__class__ = kind
    return num
