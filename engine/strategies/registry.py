"""The table of strategies: one row each. `polyphase strategies` prints it, the flags are checked against it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy

from ..compression import COMM_HOOKS, CommHook
from .ddp import DDP, DDPOptions
from .fsdp import FSDP, FSDPOptions, HSDPOptions

__all__ = ["STRATEGIES", "NoOptions", "Row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """For a strategy that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way of running, and what it can do."""

    description: str
    traffic: str
    """The collectives of a step: these and no more, see `tests/engine/loop/test_costs_integration.py`."""
    options: type
    """Frozen dataclass of what may follow the colon."""
    make: Callable[[Any, str, CommHook | None], Strategy] | None
    """From the options, the launcher's suffix and the comm hook; None where Lightning's own strategy serves."""
    compressions: tuple[str, ...] = ()
    """Names of the compressions it can do, `none` aside."""
    why_not: str = ""
    """Why it can't do the others."""


_GATHERS = (
    "per micro-batch: an all-gather of each unit in forward, and in backward but for the last unit; per optimizer step:"
    " a reduce-scatter of each"
)
_SHARDED = (
    "each rank would have to remember what it has not sent of a whole unsharded model; hsdp does all of them, between"
    " its groups"
)


STRATEGIES: dict[str, Row] = {
    "single": Row(
        description="one process, one device",
        traffic="none",
        options=NoOptions,
        make=None,
        why_not="one process sends no gradients",
    ),
    "ddp": Row(
        description="a full copy of the module per device, gradients averaged",
        traffic="per optimizer step: an all-reduce of each bucket of gradients",
        options=DDPOptions,
        make=DDP,
        compressions=tuple(COMM_HOOKS),
    ),
    "fsdp": Row(
        description="parameters, gradients and optimizer state in shards over all devices (FSDP2)",
        traffic=_GATHERS,
        options=FSDPOptions,
        make=FSDP,
        compressions=tuple(name for name, hook in COMM_HOOKS.items() if hook.reduces_shards),
        why_not=_SHARDED,
    ),
    "hsdp": Row(
        description="shards within groups of devices, gradients averaged over the groups (2-D mesh)",
        traffic=f"{_GATHERS}, then an all-reduce of its shards",
        options=HSDPOptions,
        make=FSDP,
        compressions=tuple(COMM_HOOKS),
    ),
}
"""Strategies by the name of their flag."""
