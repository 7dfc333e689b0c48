"""Broadcasts nested values from the last stage to all stages: loss, logged values, outputs.

Phases of `TreeBroadcast.broadcast`, each a broadcast from the last stage:
1. host to host, two messages: the value's form (its structure, with a slot for each tensor), pickled;
2. the tensors, one message for each dtype.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["TensorSlot", "TreeBroadcast", "flatten_tree", "unflatten_tree"]


class TensorSlot(NamedTuple):
    """Stands for a tensor in the form of a nested value."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def flatten_tree(value: Any) -> tuple[Any, list[Tensor]]:
    """Splits a nested value into its form, with a `TensorSlot` for each tensor, and its tensors."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> TensorSlot:
        tensors.append(tensor)
        return TensorSlot(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    return apply_to_collection(value, Tensor, slot), tensors


def unflatten_tree(form: Any, tensors: list[Tensor]) -> Any:
    """The inverse of `flatten_tree`."""
    return apply_to_collection(form, TensorSlot, lambda slot: tensors[slot.number])


class TreeBroadcast:
    """Broadcasts nested values from one rank of a group.

    Args:
        group: the ranks, which all call it together.
        hosts: a gloo group of the same ranks.
        source: the rank within the group that has the values.
        device: device of the tensors.
    """

    def __init__(self, group: Any, hosts: Any, source: int, device: torch.device) -> None:
        self._group, self._hosts, self._device = group, hosts, device
        self._source = dist.get_global_rank(group, source)
        self._is_source = dist.get_rank() == self._source

    def broadcast(self, value: Any = None) -> Any:
        """Returns the source's value on all ranks."""
        form, tensors = flatten_tree(value)
        message = [form]
        dist.broadcast_object_list(message, self._source, group=self._hosts)
        if not self._is_source:
            (form,), tensors = message, []
        slots: dict[torch.dtype, list[TensorSlot]] = defaultdict(list)
        apply_to_collection(form, TensorSlot, lambda slot: slots[slot.dtype].append(slot))
        received: dict[int, Tensor] = {}
        for dtype, of_dtype in slots.items():  # phase 2
            numels = [torch.Size(slot.shape).numel() for slot in of_dtype]
            if self._is_source:
                flat = torch.cat([tensors[slot.number].detach().reshape(-1).to(self._device) for slot in of_dtype])
            else:
                flat = torch.empty(sum(numels), dtype=dtype, device=self._device)
            dist.broadcast(flat, self._source, group=self._group)
            for slot, values in zip(of_dtype, flat.split(numels), strict=True):
                received[slot.number] = values.view(slot.shape)
        return unflatten_tree(form, [received[index] for index in range(len(received))])
