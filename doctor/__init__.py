"""The doctor: records of a run, and the reasons why it is slow. Only the callbacks need torch."""

from typing import TYPE_CHECKING

from polyphase.engine.registration import import_on_access

from .figures import Figures
from .interval import Interval, RankInfo, slowest_hooks
from .records import MAX_INTERVALS, Run, compact, read_run, write_rank
from .rules import RULES, Finding
from .verdict import Verdict, judge

if TYPE_CHECKING:
    from .callback import Doctor

__all__ = [
    "MAX_INTERVALS",
    "RULES",
    "Doctor",
    "Figures",
    "Finding",
    "Interval",
    "RankInfo",
    "Run",
    "Verdict",
    "compact",
    "judge",
    "read_run",
    "slowest_hooks",
    "write_rank",
]

__getattr__ = import_on_access(__name__, {"Doctor": "callback"})
