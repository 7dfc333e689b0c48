"""Averages of weights (`WeightAveraging`, `EMAWeightAveraging`) are the current weights until they begin.

Lightning's callback copies the module before training, and validates and saves this copy from the start: until its
first update, the metrics and checkpoints of the run are those of the initial weights.
"""

from itertools import chain
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

__all__ = ["follow_until_first_update"]


def follow_until_first_update(trainer: Any) -> None:
    """Copies the current weights to each average without an update yet; called before one is evaluated or saved."""
    for callback in trainer.callbacks:
        # Lightning: WeightAveraging._average_model, None outside of `fit`.
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        if average is not None and int(average.n_averaged) == 0:
            with torch.no_grad():
                for copy, current in zip(_values(average.module), _values(trainer.lightning_module), strict=True):
                    copy.copy_(current)


def _values(module: torch.nn.Module) -> chain[Tensor]:
    return chain(module.parameters(), module.buffers())
