"""Ways of running: one file each, a table of them, and what they share. Coupled to Lightning 2.6's private names."""

from .compressing import check_join, prepare_to_repeat
from .failure import announce
from .heartbeat import Heartbeat
from .layout import LayoutStrategy
from .materialize import has_meta_tensors
from .meeting import current_job
from .precision import PRECISIONS
from .registry import STRATEGIES
from .select import Parts, select
from .tensor import make_plan
from .units import shard_units
from .watchdog import Watchdog

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Heartbeat",
    "LayoutStrategy",
    "Parts",
    "Watchdog",
    "announce",
    "check_join",
    "current_job",
    "has_meta_tensors",
    "make_plan",
    "prepare_to_repeat",
    "select",
    "shard_units",
]
