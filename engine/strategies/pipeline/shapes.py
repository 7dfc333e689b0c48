"""The shapes of the values that stages send each other for one kind of micro-batch, as a trial run has found them.

A stage receives the arguments of its first unit, and after them the carried values: other values of earlier stages that
it or a later stage uses, such as the skips of a U-Net or an encoder's output. They have keys, see `remote_values.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .remote_values import CutError, Key, ValueSignature

__all__ = ["Shapes", "form_text", "shape_of", "shapes_and_dtypes", "zeros_of"]


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
