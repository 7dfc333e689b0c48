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
    from .tensor import make_plan
    from .units import shard_units
    from .watchdog import Watchdog

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Heartbeat",
    "LayoutStrategy",
    "Watchdog",
    "announce",
    "check_join",
    "has_meta_tensors",
    "make_plan",
    "prepare_to_repeat",
    "register_strategy",
    "shard_units",
]

__getattr__ = import_on_access(
    __name__,
    {
        "Heartbeat": "heartbeat",
        "LayoutStrategy": "layout",
        "Watchdog": "watchdog",
        "announce": "failure",
        "check_join": "compressing",
        "has_meta_tensors": "materialize",
        "make_plan": "tensor",
        "prepare_to_repeat": "compressing",
        "shard_units": "units",
    },
)
