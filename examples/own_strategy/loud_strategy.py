"""`loud`: `ddp` that says how far it is; `rounded`: gradients in whole multiples of a unit.

Importing this module registers both. The entry points in pyproject.toml have the engine do so when a flag names one.
"""

import dataclasses
from typing import Any

from polyphase.engine.compression import CommHook, register_comm_hook
from polyphase.engine.strategies import register_strategy
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import DDPOptions

__all__ = ["Loud", "LoudOptions", "Rounded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoudOptions(DDPOptions):
    """The options of `ddp`, and how often it speaks."""

    every: int = 5
    """Batches between two lines."""


class Loud(DDP):
    """`ddp` that says so every so many batches; its capabilities are those of `ddp`."""

    options: LoudOptions

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Rank 0 speaks."""
        if self.global_rank == 0 and batch_idx % self.options.every == 0:
            print(f"batch {batch_idx} of each of {self.world_size} ranks", flush=True)


register_strategy(
    "loud",
    Loud,
    options=LoudOptions,
    description="ddp that talks",
    compressions="all",
    traffic="as ddp",
    choose_when="to see how a strategy of your own is registered",
)


@register_comm_hook
class Rounded(CommHook):
    """Gradients in whole multiples of a unit."""

    name = "rounded"
    description = "rounded gradients: rounded[:unit]; unit 0.001"

    def __init__(self, unit: float = 1e-3) -> None:
        super().__init__()
        self.unit = unit

    def average(self, bucket: Any, wire: Any) -> None:
        """Rounds, then averages over the ranks."""
        bucket.gradients.div_(self.unit).round_().mul_(self.unit / wire.size)
        wire.all_reduce(bucket.gradients)
