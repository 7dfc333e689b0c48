"""The row of a strategy in the table of strategies, and predicates of compressions for rows; read without torch."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..compression.registry import ROWS as HOOKS
from ..compression.registry import HookRow
from ..precision.names import PRECISIONS

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "StrategySpec",
    "all_but_auto",
    "always",
    "compressions_of_shards",
    "every_compression",
    "never",
    "no_compression",
    "unless_cut",
]


def no_compression(name: str, hook: HookRow) -> bool:
    """No compression: gradients can only be sent uncompressed."""
    return False


def every_compression(name: str, hook: HookRow) -> bool:
    """Every compression, including those that are registered later."""
    return True


def compressions_of_shards(name: str, hook: HookRow) -> bool:
    """Compressions that can work on a reduce-scatter of shards."""
    return hook.reduces_shards


def all_but_auto(name: str, hook: HookRow) -> bool:
    """Every compression except `auto`, which compares the length of equal steps."""
    return name != "auto"


def always(options: Any) -> bool:
    """Whatever the options are."""
    return True


def never(options: Any) -> bool:
    """Not with any options."""
    return False


def unless_cut(options: Any) -> bool:
    """Unless the options name a number of micro-batches, which take less memory on one device, too."""
    return options.microbatches in (None, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """The properties of a strategy."""

    description: str
    """A few words, for one line of the terminal."""
    traffic: str
    """The collectives of a step, all of them: see `tests/engine/loop/test_costs_integration.py`."""
    choose_when: str = ""
    """When to choose it."""
    options: type
    """Frozen dataclass of the options after the colon."""
    make: "Callable[..., Strategy] | None"
    """Makes the strategy from the options, the launcher's suffix and the comm hook; None for one process on one device,
    which uses Lightning's own strategy."""
    make_for_several: "Callable[..., Strategy] | None" = None
    """Makes the strategy for one process on several devices, from the type and number of devices, the number of nodes
    and `sync_batchnorm`."""
    is_single_alone: Callable[[Any], bool] = never
    """Takes the options; returns whether one process on one device trains as under `single`, since the strategy would
    only divide what one process has as a whole. A compression and offload='parameters' need the strategy itself."""
    note: str = ""
    """A note that is printed once when the strategy is chosen."""
    takes_compression: Callable[[str, HookRow], bool] = no_compression
    """Takes the name and row of a compression; returns whether the strategy can use it."""
    why_not: str = ""
    """Why it does not support the other compressions."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """Names of the supported precisions."""
    why_not_precision: str = ""
    """Why it does not support the other precisions."""

    @property
    def compressions(self) -> tuple[str, ...]:
        """Names of the supported compressions, without `none`."""
        return tuple(name for name, hook in HOOKS.items() if self.takes_compression(name, hook))
