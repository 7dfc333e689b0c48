"""Callbacks that watch and log a run; rank 0 writes."""

from .communication import CommunicationMonitor
from .console import ConsoleLogger, default_progress_bar
from .doctor import Doctor
from .gradient_norm import GradientNormMonitor
from .light_doctor import LightDoctor
from .memory import MemoryMonitor
from .progress import ProgressBar
from .replica_guard import ReplicaError, ReplicaGuard
from .run_summary import RunSummary
from .snapshot import Snapshot, default_snapshot
from .throughput import ThroughputMonitor
from .trace_profiler import TraceProfiler

__all__ = [
    "CommunicationMonitor",
    "ConsoleLogger",
    "Doctor",
    "GradientNormMonitor",
    "LightDoctor",
    "MemoryMonitor",
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
