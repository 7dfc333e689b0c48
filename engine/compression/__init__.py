"""Gradient compression: one comm hook a file, and the table of them in `registry`; torch comes with the first hook."""

from typing import TYPE_CHECKING

from ..lazy import import_on_access
from .registry import COMM_HOOKS, make_comm_hook, register_comm_hook

if TYPE_CHECKING:
    from .auto import Auto
    from .base import CommHook, NonFiniteGradientError
    from .bucket import Bucket, Member
    from .deal import deal_residuals
    from .forecast import Forecast, Link
    from .plain import Plain
    from .wire import Sent, Wire, busy_s, seconds_between

__all__ = [
    "COMM_HOOKS",
    "Auto",
    "Bucket",
    "CommHook",
    "Forecast",
    "Link",
    "Member",
    "NonFiniteGradientError",
    "Plain",
    "Sent",
    "Wire",
    "busy_s",
    "deal_residuals",
    "make_comm_hook",
    "register_comm_hook",
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
        "Member": "bucket",
        "NonFiniteGradientError": "base",
        "Plain": "plain",
        "Sent": "wire",
        "Wire": "wire",
        "busy_s": "wire",
        "deal_residuals": "deal",
        "seconds_between": "wire",
    },
)
