"""The doctor: records of a run, and the reasons why it is slow. Nothing here imports torch."""

from .figures import Figures
from .interval import Interval, RankInfo, slowest_hooks
from .records import MAX_INTERVALS, Run, compact, read_run, write_rank
from .rules import RULES, Finding
from .verdict import Verdict, judge

__all__ = [
    "MAX_INTERVALS",
    "RULES",
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
