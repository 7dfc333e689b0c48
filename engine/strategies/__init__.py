"""Ways of running: one file each, and what they share. Coupled to Lightning 2.6's private names.

The table of them, `registry`, needs no torch; the rest is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from ..lazy import import_on_access
from .precision_names import PRECISIONS
from .registry import STRATEGIES, register_strategy

if TYPE_CHECKING:
    from .compressing import check_join, prepare_to_repeat
    from .failure import announce
    from .heartbeat import Heartbeat
    from .layout import LayoutStrategy
    from .materialize import has_meta_tensors
    from .meeting import current_job
    from .tensor import make_plan
    from .uncaught import Failure, failure_of, forget_failures, on_uncaught
    from .units import shard_units
    from .watchdog import Watchdog

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Failure",
    "Heartbeat",
    "LayoutStrategy",
    "Watchdog",
    "announce",
    "check_join",
    "current_job",
    "failure_of",
    "forget_failures",
    "has_meta_tensors",
    "make_plan",
    "on_uncaught",
    "prepare_to_repeat",
    "register_strategy",
    "shard_units",
]

__getattr__ = import_on_access(
    __name__,
    {
        "Failure": "uncaught",
        "Heartbeat": "heartbeat",
        "LayoutStrategy": "layout",
        "Watchdog": "watchdog",
        "announce": "failure",
        "check_join": "compressing",
        "current_job": "meeting",
        "failure_of": "uncaught",
        "forget_failures": "uncaught",
        "has_meta_tensors": "materialize",
        "make_plan": "tensor",
        "on_uncaught": "uncaught",
        "prepare_to_repeat": "compressing",
        "shard_units": "units",
    },
)
