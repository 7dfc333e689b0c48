"""Runs as their ranks would have noted them, of ten-millisecond steps."""

import dataclasses
from typing import Any

from polyphase.doctor import Finding, Interval, RankInfo, Run, judge
from polyphase.engine.phases import PHASES

STEPS = 100
HEALTHY = {"data_wait": 0.1, "compute": 8.0, "communication": 0.4, "waiting": 0.3, "optimizer": 1.0, "engine": 0.2}


def interval(step: int = STEPS, num_steps: int = STEPS, **phases_ms: float) -> Interval:
    """An interval of steps that each take 10 ms, but for what is given in ms by phase."""
    ms = {**dict.fromkeys(PHASES, 0.0), **HEALTHY, **phases_ms}
    seconds = {phase: each * num_steps / 1e3 for phase, each in ms.items()}
    return Interval(
        step=step,
        num_steps=num_steps,
        wall_s=sum(seconds.values()),
        seconds=seconds,
        num_batches=num_steps,
        num_samples=8 * num_steps,
        cpu_s=ms["compute"] * num_steps / 1e3,
        runqueue_s=0.0,
    )


def info(rank: int = 0, world_size: int = 2, **fields: Any) -> RankInfo:
    defaults = {"strategy": "ddp", "layout": {"replicate": world_size}, "num_workers": 2, "local_ranks": world_size}
    return RankInfo(rank=rank, world_size=world_size, host=f"host{rank}", num_cpus=8.0, **{**defaults, **fields})


def run_of(*intervals: Interval, **fields: Any) -> Run:
    """A run of as many ranks."""
    ranks = {rank: info(rank, len(intervals), **fields) for rank in range(len(intervals))}
    return Run(ranks, {rank: [each] for rank, each in enumerate(intervals)})


def changed(each: Interval, **fields: Any) -> Interval:
    return dataclasses.replace(each, **fields)


def only(run: Run) -> Finding:
    """The one finding."""
    findings = judge(run).findings
    assert len(findings) == 1, findings
    return findings[0]


def exposed(**fields: Any) -> Run:
    """A run that nothing but its communication slows down."""
    intervals = [changed(interval(communication=4.0), **fields)] * 2
    return run_of(*intervals, flags={"strategy": "ddp_fork:bucket_cap_mb=0.1"} if not fields else {})
