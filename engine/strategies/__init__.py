"""Ways of running: one file each, a table of them, and what they share. Coupled to Lightning 2.6's private names."""

from .compressing import check_join, prepare_to_repeat
from .failure import announce
from .heartbeat import Heartbeat
from .layout import LayoutStrategy
from .materialize import has_meta_tensors
from .precision import PRECISIONS
from .registry import STRATEGIES
from .select import Parts, select
from .tensor import make_plan
from .uncaught import Failure, failure_of, on_uncaught
from .uncaught import forget as forget_failures
from .units import shard_units
from .watchdog import Watchdog

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Failure",
    "Heartbeat",
    "LayoutStrategy",
    "Parts",
    "Watchdog",
    "announce",
    "check_join",
    "failure_of",
    "forget_failures",
    "has_meta_tensors",
    "make_plan",
    "on_uncaught",
    "prepare_to_repeat",
    "select",
    "shard_units",
]
