"""The doctor: what the ranks noted of a run, and why it is slow. All of it is read without torch."""

from .records import MAX_INTERVALS, Interval, RankInfo, Run, compact, read_run, slowest_hooks, write_rank
from .rules import RULES, Finding
from .verdict import Verdict, judge

__all__ = [
    "MAX_INTERVALS",
    "RULES",
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
