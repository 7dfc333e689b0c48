"""Callbacks that watch and log a run; rank 0 writes."""

from typing import TYPE_CHECKING, Any

from .communication import CommunicationMonitor
from .console import ConsoleLogger, default_progress_bar
from .memory import MemoryMonitor
from .optimizer_monitor import OptimizerMonitor
from .progress import ProgressBar
from .replica_guard import ReplicaError, ReplicaGuard
from .run_summary import RunSummary
from .snapshot import Snapshot, default_snapshot
from .throughput import ThroughputMonitor
from .trace_profiler import TraceProfiler

if TYPE_CHECKING:
    from polyphase.doctor import Doctor

__all__ = [
    "CommunicationMonitor",
    "ConsoleLogger",
    "Doctor",
    "MemoryMonitor",
    "OptimizerMonitor",
    "ProgressBar",
    "ReplicaError",
    "ReplicaGuard",
    "RunSummary",
    "Snapshot",
    "ThroughputMonitor",
    "TraceProfiler",
    "default_progress_bar",
    "default_snapshot",
]


def __getattr__(name: str) -> Any:
    """Imports the doctor when its callback is first asked for: it is built on this package."""
    if name == "Doctor":
        from polyphase.doctor import Doctor

        return Doctor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
