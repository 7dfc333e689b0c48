"""Gradient compression: one comm hook per file, and a table in `registry`; the first hook imports torch."""

from typing import TYPE_CHECKING

from ..registration import import_on_access
from .registry import COMM_HOOKS, make_comm_hook, register_comm_hook

if TYPE_CHECKING:
    from .auto import Auto
    from .base import CommHook, NonFiniteGradientError
    from .cast import AllReduceHook
    from .counting_group import Bucket, CountingGroup, ParamSlice, TrafficKey, busy_s, seconds_between
    from .feedback import reshard_residuals
    from .forecast import Forecast, Link

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
        "Bucket": "counting_group",
        "CommHook": "base",
        "Forecast": "forecast",
        "Link": "forecast",
        "ParamSlice": "counting_group",
        "NonFiniteGradientError": "base",
        "AllReduceHook": "cast",
        "TrafficKey": "counting_group",
        "CountingGroup": "counting_group",
        "busy_s": "counting_group",
        "reshard_residuals": "feedback",
        "seconds_between": "counting_group",
    },
)
