"""Gradient compression: one comm hook per file, and a table in `registry`; the first hook imports torch."""

from typing import TYPE_CHECKING

from ..lazy import import_on_access
from .registry import COMM_HOOKS, make_comm_hook, register_comm_hook

if TYPE_CHECKING:
    from .all_reduce import AllReduceHook
    from .auto import Auto
    from .base import CommHook, NonFiniteGradientError
    from .bucket import Bucket, ParamSlice
    from .counting_group import CountingGroup, TrafficKey, busy_s, seconds_between
    from .forecast import Forecast, Link
    from .residual_resharding import reshard_residuals

__all__ = [
    "COMM_HOOKS",
    "AllReduceHook",
    "Auto",
    "Bucket",
    "CommHook",
    "CountingGroup",
    "Forecast",
    "Link",
    "NonFiniteGradientError",
    "ParamSlice",
    "TrafficKey",
    "busy_s",
    "make_comm_hook",
    "register_comm_hook",
    "reshard_residuals",
    "seconds_between",
]

__getattr__ = import_on_access(
    __name__,
    {
        "Auto": "auto",
        "Bucket": "bucket",
        "CommHook": "base",
        "Forecast": "forecast",
        "Link": "forecast",
        "ParamSlice": "bucket",
        "NonFiniteGradientError": "base",
        "AllReduceHook": "all_reduce",
        "TrafficKey": "counting_group",
        "CountingGroup": "counting_group",
        "busy_s": "counting_group",
        "reshard_residuals": "residual_resharding",
        "seconds_between": "counting_group",
    },
)
