"""The shapes of the values that stages hand over in one kind of micro-batch, found in a trial run.

A stage is sent what its first unit is called with and, after that, what is carried: values of earlier stages that it
uses besides, such as the skips of a U-Net or an encoder's output. The latter have a key: see `calls.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .absent import CutError
from .calls import Form, Key

__all__ = ["Shapes", "form_text", "forms_of", "shape_of", "zeros_of"]


@dataclasses.dataclass
class Shapes:
    """The results of the trial run with one kind of micro-batch; the same on all stages."""

    units: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Structure of what each unit returns, by its number, with places for tensors."""
    offered: dict[int, list[Tensor | None]] = dataclasses.field(default_factory=dict)
    """Arguments of the next stage's first unit, as shapes on the meta device; None: the stage lacks it."""
    needed: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Which of them the next stage, under whose number they are, does not have itself."""
    starts: dict[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    """The number of the step's calls that come before a stage's own part, by stage."""
    made: dict[int, dict[Key, Form]] = dataclasses.field(default_factory=dict)
    """Values that a stage computes outside of its units."""
    used: dict[int, dict[Key, Form]] = dataclasses.field(default_factory=dict)
    """Values of earlier stages that a stage uses, its first unit's arguments aside."""
    borrowed: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """Names of parameters that a stage uses outside of its units, and another one holds."""
    carried: dict[int, list[Key]] = dataclasses.field(default_factory=dict)
    """Values that a stage is sent: for itself, or for stages behind it."""
    shapes: dict[Key, Tensor] = dataclasses.field(default_factory=dict)
    """Shapes of the values that are carried, on the meta device."""

    def sent(self, stage: int) -> tuple[Tensor, ...]:
        """Shapes of what a stage sends."""
        offered = (self.offered[stage][index] for index in self.needed[stage + 1])
        return (
            *(shape for shape in offered if shape is not None),
            *(self.shapes[key] for key in self.carried.get(stage + 1, [])),
        )

    def carry(self) -> None:
        """Finds out what is carried from which stage to which, when all of them have told what they use.

        Raises:
            CutError: the stages' calls differ, so that a value can't be told by its number.
        """
        carried: dict[int, set[Key]] = {stage: set() for stage in self.needed}
        for stage, used in self.used.items():
            for key, form in used.items():
                maker = max(number for number, start in self.starts.items() if start < key[0])
                if self.made[maker].get(key) != form:
                    raise CutError(
                        f"pipeline stage {stage} uses {form.text} of stage {maker}, which that one computes in another"
                        " way or not at all: the step depends on values or on what a stage has. Hand it on through the"
                        " arguments of the blocks, or choose another strategy, such as 'fsdp'."
                    )
                self.shapes[key] = shape_of(torch.empty(form.shape, dtype=form.dtype, device="meta"))
                for receiver in range(maker + 1, stage + 1):
                    carried[receiver].add(key)
        self.carried = {stage: sorted(keys) for stage, keys in carried.items()}


def shape_of(tensor: Tensor) -> Tensor:
    """On the meta device, with a gradient where one is sent with a gradient."""
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return shape.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


def zeros_of(shape: Tensor, device: torch.device) -> Tensor:
    """Returns zeros of that shape and dtype, on `device`."""
    return torch.zeros(shape.shape, dtype=shape.dtype, device=device).requires_grad_(shape.requires_grad)


def forms_of(tensors: Sequence[Tensor]) -> list[tuple[list[int], torch.dtype]]:
    """Returns the shapes and dtypes of tensors, which must be the same in each micro-batch."""
    return [(list(tensor.shape), tensor.dtype) for tensor in tensors]


def form_text(tensors: Sequence[Tensor]) -> str:
    """The same, in words."""
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in forms_of(tensors)) or "none"
