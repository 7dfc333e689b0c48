"""`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` in the user's code, under several ranks.

A re-entrant checkpoint runs a backward inside of the backward. With two checkpoints of one block in a step, DDP finds a
parameter ready twice, and FSDP2 averages gradients before the second backward has added to them. While a strategy of
several ranks runs, such a checkpoint is computed without re-entrant autograd: the same numbers, in one backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torchs

__all__ = ["allow_reentrant", "avoid_reentrant"]

_Reentrant = torchs.CheckpointFunction


class _OneBackward:
    """Takes the place of torch's function, which `checkpoint` looks up at each call."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Runs `function`, and again in backward."""
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return torchs.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        # Without an input that requires a gradient, a re-entrant checkpoint has none for its parameters either.
        return _Reentrant.apply(function, preserve_rng_state, *args)


def avoid_reentrant() -> None:
    """Computes checkpoints without re-entrant autograd, until `allow_reentrant`."""
    torchs.CheckpointFunction = _OneBackward  # type: ignore[assignment, misc]


def allow_reentrant() -> None:
    """Restores torch's function."""
    torchs.CheckpointFunction = _Reentrant  # type: ignore[misc]
