"""Ways of running: one file each, a table of them, and what they share. Coupled to Lightning 2.6's private names."""

from .compressing import check_join, prepare_to_repeat
from .failure import announce
from .heartbeat import Heartbeat
from .host_group import flags, gathered, num_ranks, numbers
from .launch import LayoutStrategy
from .materialize import has_meta_tensors
from .precision import PRECISIONS
from .registry import STRATEGIES
from .select import Parts, select
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
    "flags",
    "gathered",
    "has_meta_tensors",
    "num_ranks",
    "numbers",
    "prepare_to_repeat",
    "select",
]
