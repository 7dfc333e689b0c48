"""The shapes of the values that stages send each other, as a trial run has found them; and results for all stages.

A stage receives the arguments of its first unit, and after them the carried values: other values of earlier stages that
it or a later stage uses, such as the skips of a U-Net or an encoder's output. They have keys, see `remote_values.py`.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..callers import CutError
from .remote_values import Key, ValueSignature

__all__ = [
    "Shapes",
    "TensorSlot",
    "TreeBroadcast",
    "flatten_tree",
    "form_text",
    "shape_of",
    "shapes_and_dtypes",
    "unflatten_tree",
    "zeros_of",
]


@dataclasses.dataclass
class Shapes:
    """The results of the trial run with one kind of micro-batch; equal on all stages. Keys are stages, unless said."""

    units: dict[int, Any] = dataclasses.field(default_factory=dict)
    """The output of each unit, by the unit's number, with a `TensorSlot` for each tensor."""
    offered: dict[int, list[Tensor | None]] = dataclasses.field(default_factory=dict)
    """Arguments of the next stage's first unit, as shapes on the meta device; None: the stage lacks it."""
    needed: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Indices of the arguments of a stage's first unit that the stage does not have itself."""
    starts: dict[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    """The number of calls in the step before a stage's own part."""
    made: dict[int, dict[Key, ValueSignature]] = dataclasses.field(default_factory=dict)
    """Values that a stage computes outside of its units."""
    used: dict[int, dict[Key, ValueSignature]] = dataclasses.field(default_factory=dict)
    """Values of earlier stages that a stage uses, without its first unit's arguments."""
    borrowed: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """Names of parameters that a stage uses outside of its units, and that another stage holds."""
    carried: dict[int, list[Key]] = dataclasses.field(default_factory=dict)
    """Carried values that a stage receives: for itself, or for later stages."""
    shapes: dict[Key, Tensor] = dataclasses.field(default_factory=dict)
    """Shapes of the carried values, on the meta device, by their key."""

    def sent(self, stage: int) -> tuple[Tensor, ...]:
        """Returns the shapes of the tensors that a stage sends to the next one, on the meta device."""
        offered = (self.offered[stage][index] for index in self.needed[stage + 1])
        return (
            *(shape for shape in offered if shape is not None),
            *(self.shapes[key] for key in self.carried.get(stage + 1, [])),
        )

    def carry(self) -> None:
        """Derives which values are carried to which stage, when all stages have noted what they use.

        Raises:
            CutError: the stages' calls differ, so that the number of a call does not identify a value.
        """
        carried: dict[int, set[Key]] = {stage: set() for stage in self.needed}
        for stage, used in self.used.items():
            for key, signature in used.items():
                maker = max(number for number, start in self.starts.items() if start < key[0])
                if self.made[maker].get(key) != signature:
                    raise CutError(
                        f"pipeline stage {stage} uses {signature.text} of stage {maker}, which that one computes in"
                        " another way or not at all: the step depends on values or on what a stage has. Hand it on"
                        " through the arguments of the blocks, or choose another strategy, such as 'fsdp'."
                    )
                self.shapes[key] = shape_of(torch.empty(signature.shape, dtype=signature.dtype, device="meta"))
                for receiver in range(maker + 1, stage + 1):
                    carried[receiver].add(key)
        self.carried = {stage: sorted(keys) for stage, keys in carried.items()}


def shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor of this shape and dtype on the meta device, which requires a gradient if one is sent back."""
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return shape.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


def zeros_of(shape: Tensor, device: torch.device) -> Tensor:
    """Returns zeros of that shape and dtype, on `device`."""
    return torch.zeros(shape.shape, dtype=shape.dtype, device=device).requires_grad_(shape.requires_grad)


def shapes_and_dtypes(tensors: Sequence[Tensor]) -> list[tuple[list[int], torch.dtype]]:
    """Returns the shapes and dtypes of tensors, which must be equal in each micro-batch."""
    return [(list(tensor.shape), tensor.dtype) for tensor in tensors]


def form_text(tensors: Sequence[Tensor]) -> str:
    """Returns the shapes and dtypes of tensors in words."""
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes_and_dtypes(tensors)) or "none"


# --- nested values of the last stage, broadcast to all stages: loss, logged values, outputs
# Phases of `TreeBroadcast.broadcast`, each a broadcast from the last stage:
# 1. host to host, two messages: the value's form (its structure, with a slot for each tensor), pickled;
# 2. the tensors, one message for each dtype.


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
