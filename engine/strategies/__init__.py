"""Ways of running: one file each, and what they share. Coupled to Lightning 2.6's private names.

The table of them, `registry`, needs no torch; the rest is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from ..lazy import import_on_access
from .precision_names import PRECISIONS
from .registry import STRATEGIES, register_strategy

if TYPE_CHECKING:
    from .clipping import norm_of
    from .compressing import check_join, prepare_to_repeat
    from .equal_ranks import move_module
    from .failure import announce
    from .heartbeat import Heartbeat
    from .layout import LayoutStrategy
    from .meeting import current_job
    from .mesh import MeshStrategy
    from .stored_weights import check_stored, read_stored, read_weights
    from .tensor import make_plan
    from .uncaught import Failure, failure_of, forget_failures, on_uncaught
    from .unit_plan import describe_units
    from .watchdog import Watchdog

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Failure",
    "Heartbeat",
    "LayoutStrategy",
    "MeshStrategy",
    "Watchdog",
    "announce",
    "check_join",
    "check_stored",
    "current_job",
    "describe_units",
    "failure_of",
    "forget_failures",
    "make_plan",
    "move_module",
    "norm_of",
    "on_uncaught",
    "prepare_to_repeat",
    "read_stored",
    "read_weights",
    "register_strategy",
]

__getattr__ = import_on_access(
    __name__,
    {
        "Failure": "uncaught",
        "Heartbeat": "heartbeat",
        "LayoutStrategy": "layout",
        "MeshStrategy": "mesh",
        "Watchdog": "watchdog",
        "move_module": "equal_ranks",
        "announce": "failure",
        "check_join": "compressing",
        "check_stored": "stored_weights",
        "current_job": "meeting",
        "describe_units": "unit_plan",
        "failure_of": "uncaught",
        "forget_failures": "uncaught",
        "make_plan": "tensor",
        "norm_of": "clipping",
        "on_uncaught": "uncaught",
        "prepare_to_repeat": "compressing",
        "read_stored": "stored_weights",
        "read_weights": "stored_weights",
    },
)
