"""Imports all that the checks use, so that forks of a process have it."""

from . import checks_kernels, checks_memory, checks_ranks, checks_saves, checks_steps, checks_streams, checks_waits
from . import figures as figures

__all__ = [
    "checks_kernels", "checks_memory", "checks_ranks", "checks_saves", "checks_steps", "checks_streams",
    "checks_waits", "figures",
]  # fmt: skip
