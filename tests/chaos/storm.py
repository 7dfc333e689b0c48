"""Kills a training job again and again, and looks at what became of it.

    python -m tests.chaos.storm --only ddp fsdp --kills 20

Victims are drawn at random: a rank, or the agent (torchrun), by SIGKILL, at a random moment; or the rank that is the
first to get to a point inside a start, a save, a removal or a load (`job.POINTS`). A job whose agent is gone is started
again by the same command. At the end: whether any process is left, which samples were trained on how often in each
epoch (of steps that were done twice, because they were not saved, the last time counts), how far the weights are from
those of a job that nobody disturbed, and how long it took from each kill to the next step.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import warm
from ..distributed import ROOT
from .job import POINTS

__all__ = [
    "CONFIGURATIONS",
    "JOB",
    "TORCHRUN",
    "Job",
    "Outcome",
    "judge",
    "steps_since",
    "storm",
    "times_of",
    "undisturbed",
]

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {"num_ranks": 1}),
    "ddp": ("ddp", {}),
    "ddp, accumulation": ("ddp", {"accumulate_grad_batches": 2}),
    "ddp, loader workers": ("ddp", {"num_workers": 2}),
    "ddp, in order": ("ddp", {"shuffle": False}),
    "ddp, global batch": ("ddp", {"global_batch_size": 8, "micro_batch_size": 2}),
    "ddp, bf16-mixed": ("ddp", {"precision": "bf16-mixed"}),
    "ddp, 16-mixed": ("ddp", {"precision": "16-mixed"}),
    "ddp, 64-true": ("ddp", {"precision": "64-true"}),
    "ddp, powersgd": ("ddp", {"compression": "powersgd:2"}),
    "ddp, topk, accumulation": ("ddp", {"compression": "topk:0.1", "accumulate_grad_batches": 2}),
    "ddp, sign": ("ddp", {"compression": "sign"}),
    "ddp, int8, bf16-mixed": ("ddp", {"compression": "int8", "precision": "bf16-mixed"}),
    "zero1": ("zero1", {}),
    "zero1, bf16 gradients": ("zero1", {"compression": "bf16"}),
    "fsdp": ("fsdp", {}),
    "fsdp, bf16-mixed, accumulation": ("fsdp", {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "fsdp, int8": ("fsdp", {"compression": "int8"}),
    "local_sgd": ("local_sgd:sync_every=4", {}),
    "diloco": ("diloco:sync_every=4", {}),
    "diloco, beside training": ("diloco:sync_every=4,fragments=2,overlap_steps=3", {}),
    "local_sgd, few values": (
        "local_sgd:sync_every=4",
        {"compression": "topk:0.125,chunk=64,bits=2,decay=0.95"},
    ),
    "ddp, Muon and AdamW": ("ddp", {"uses_muon": True}),
    "fsdp, Muon and AdamW": ("fsdp", {"uses_muon": True}),
    "cp": ("cp", {"has_sequences": True}),
    "tp": ("tp", {}),
    "pp": ("pp", {}),
    "hsdp": ("hsdp:replicate=2", {"num_ranks": 4}),
    "fsdp+tp": ("fsdp+tp:tp=2", {"num_ranks": 4}),
    "pp+ddp": ("pp+ddp:pipeline_size=2", {"num_ranks": 4}),
    "pp+fsdp": ("pp+fsdp:pipeline_size=2", {"num_ranks": 4}),
    "ps": ("ps", {}),
}
"""Strategy, and flags of the engine, the loader and the launcher, by name."""

JOB = Path(__file__).with_name("job.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=100", "--monitor-interval=0.2")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a storm did."""

    num_kills: int
    num_steps: int
    lost: int
    """Samples of any epoch that no step was trained on."""
    repeated: int
    """Samples that steps of one epoch were trained on more than once."""
    difference: float
    """Largest absolute difference of a weight from the undisturbed job's."""
    recoveries_s: list[float]
    """Seconds from each kill to the next step."""
    left_running: int = 0
    """Processes of the job that were there when it was over."""

    def __str__(self) -> str:
        slowest = f"{max(self.recoveries_s):.1f}" if self.recoveries_s else "-"
        median = f"{sorted(self.recoveries_s)[len(self.recoveries_s) // 2]:.1f}" if self.recoveries_s else "-"
        return (
            f"{self.num_kills} kills in {self.num_steps} steps: {self.lost} samples lost, {self.repeated} repeated,"
            f" max |difference| {self.difference:.1e}, {self.left_running} left running;"
            f" first step after a kill: median {median} s, slowest {slowest} s"
        )


def undisturbed(
    folder: Path,
    strategy: str,
    num_samples: int,
    num_epochs: int,
    *,
    dropout: float = 0.1,
    flags: dict[str, Any] | None = None,
    has_warm_ranks: bool = False,
) -> None:
    """Runs the job once, to its end; `has_warm_ranks` as for `storm`."""
    more = {"dropout": dropout, "flags": flags, "has_warm_ranks": has_warm_ranks}
    with Job(folder, strategy, num_samples, num_epochs, pause_s=0.0, **more) as agent:
        if agent.wait(timeout=600):  # on a machine with much else to do
            raise RuntimeError((folder / "log.txt").read_text())


def storm(
    folder: Path,
    calm: Path,
    strategy: str,
    num_samples: int,
    num_epochs: int,
    *,
    num_kills: int,
    pause_s: float = 0.05,
    seed: int = 0,
    timeout_s: float = 600,
    points: Sequence[str] = POINTS,
    flags: dict[str, Any] | None = None,
    has_warm_ranks: bool = False,
) -> Outcome:
    """Runs the job, kills `num_kills` processes of it, and compares the outcome with that of the job in `calm`.

    Args:
        folder: of the job.
        calm: folder of the same job, undisturbed.
        strategy: of the engine.
        num_samples: in an epoch.
        num_epochs: of the job.
        num_kills: how many processes to kill; every second one by a trap.
        pause_s: how long each batch takes.
        seed: of the moments and victims.
        timeout_s: for all of it.
        points: where traps are set, one after the other; none: all kills are at random moments.
        flags: of the engine and the loader.
        has_warm_ranks: the ranks are forks of a process that has imported torch; then the agent is never killed, since
            forks are not its children.
    """
    draw = random.Random(seed)
    kills: list[float] = []
    deadline = time.monotonic() + timeout_s
    traps = [folder / f"trap-{points[number % len(points)]}" for number in range(num_kills // 2)] if points else []
    more = {"pause_s": pause_s, "flags": flags, "has_warm_ranks": has_warm_ranks}
    while not (folder / "weights.pt").exists():
        with Job(folder, strategy, num_samples, num_epochs, **more) as agent:
            while agent.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {timeout_s} s and {len(kills)} kills:\n{_tail(folder)}")
                if traps and _has_sprung(traps[0]):
                    kills.append(time.time())
                    del traps[0]
                if traps and not traps[0].exists() and len(kills) + len(traps) <= num_kills:
                    traps[0].touch()
                if len(kills) + len(traps) >= num_kills or not steps_since(folder, kills[-1] if kills else 0.0):
                    time.sleep(0.02)
                    continue
                time.sleep(draw.uniform(0.0, 1.0))
                if _kill(agent, draw, spares_agent=has_warm_ranks):
                    kills.append(time.time())
    for trap in traps:  # the job was over first
        trap.unlink(missing_ok=True)
    outcome = judge(folder, calm, num_samples, num_epochs, kills)
    return replace(outcome, left_running=len(_processes_of(folder)))


def _has_sprung(trap: Path) -> bool:
    sprung = trap.with_name(f"{trap.name}-sprung")
    if not sprung.exists():
        return False
    sprung.unlink()
    return True


def _processes_of(folder: Path, patience_s: float = 15.0) -> list[psutil.Process]:
    """What is left of the job after a while, its agents and the workers of its loaders included."""
    deadline = time.monotonic() + patience_s
    while True:
        found = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or ())]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


class Job:
    """The job under torchrun; all that is left of it is killed at the end of the block."""

    def __init__(
        self,
        folder: Path,
        strategy: str,
        num_samples: int,
        num_epochs: int,
        *,
        pause_s: float,
        dropout: float = 0.1,
        flags: dict[str, Any] | None = None,
        launcher: Sequence[str] = (),
        has_warm_ranks: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [str(folder), strategy, str(num_samples), str(num_epochs), str(pause_s), str(dropout)]
        arguments.append(json.dumps(flags or {}))
        num_ranks = (flags or {}).get("num_ranks", 2)
        launcher = launcher or [*TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}"]
        by_ranks = ["--no-python", warm.python()] if has_warm_ranks else []
        self._command = [*launcher, *by_ranks, str(JOB), *arguments]
        self._log = (folder / "log.txt").open("a")

    def __enter__(self) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._agent = subprocess.Popen(
            self._command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        return self._agent

    def __exit__(self, *_: object) -> None:
        if self._agent.poll() is None:
            for process in [*psutil.Process(self._agent.pid).children(recursive=True), self._agent]:
                process.kill()
        self._agent.wait()
        self._log.close()


def _kill(agent: subprocess.Popen, draw: random.Random, *, spares_agent: bool) -> bool:
    """SIGKILL to a rank, or, one time in five, to the agent."""
    try:
        ranks = [p for p in psutil.Process(agent.pid).children(recursive=True) if str(JOB) in p.cmdline()]
        if not ranks:
            return False
        victim = agent.pid if draw.random() < 0.2 and not spares_agent else draw.choice(ranks).pid
        os.kill(victim, signal.SIGKILL)
    except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
        return False
    if victim == agent.pid:
        agent.wait()
        _wait_for(ranks)
    return True


def _wait_for(orphans: list[psutil.Process]) -> None:
    """Ranks whose agent is gone have to notice."""
    _, alive = psutil.wait_procs(orphans, timeout=30)
    if alive:
        raise RuntimeError("ranks outlived their agent by 30 s")


@dataclass(frozen=True)
class _Batch:
    time: float
    epoch: int
    step: int
    samples: tuple[int, ...]


def _batches(folder: Path) -> Iterator[tuple[str, list[_Batch]]]:
    """The batches of each start of each rank; later starts have greater names."""
    for record in sorted(folder.glob("start-*")):
        lines = [line.split() for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]
        batches = [_Batch(float(at), int(epoch), int(step), tuple(map(int, rest))) for at, epoch, step, *rest in lines]
        yield record.name.rpartition("-")[0], batches


def steps_since(folder: Path, moment: float) -> bool:
    return any(batch.time > moment for _, batches in _batches(folder) for batch in batches[-1:])


def times_of(folder: Path) -> list[float]:
    """When each batch of each rank began."""
    return [batch.time for _, batches in _batches(folder) for batch in batches]


def judge(folder: Path, calm: Path, num_samples: int, num_epochs: int, kills: list[float]) -> Outcome:
    starts = list(_batches(folder))
    # A step that was not saved is done again by a later start: its samples are those of the last time.
    last = {batch.step: start for start, batches in starts for batch in batches}
    trained: list[Counter[int]] = [Counter() for _ in range(num_epochs)]
    for start, batches in starts:
        for batch in batches:
            if last[batch.step] == start:
                trained[batch.epoch].update(batch.samples)
    firsts = sorted(batches[0].time for _, batches in starts if batches)
    recoveries = [next(first for first in firsts if first > kill) - kill for kill in kills]
    found, expected = (torch.load(each / "weights.pt", weights_only=True) for each in (folder, calm))
    return Outcome(
        num_kills=len(kills),
        num_steps=len(last),
        lost=sum(num_samples - len(epoch) for epoch in trained),
        repeated=sum(count - 1 for epoch in trained for count in epoch.values()),
        difference=max((found[key] - expected[key]).abs().max().item() for key in expected),
        recoveries_s=recoveries,
    )


def _tail(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--samples", type=int, default=360)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action="store_true", help="ranks are forks of one process: five times as fast")
    options = parser.parse_args()
    outcomes = [_storm_over(name, options) for name in options.only]
    print(
        f"{len(outcomes)} configurations, {sum(outcome.num_kills for outcome in outcomes)} kills:"
        f" {sum(outcome.lost for outcome in outcomes)} lost, {sum(outcome.repeated for outcome in outcomes)} repeated,"
        f" {sum(outcome.difference > 0 for outcome in outcomes)} different,"
        f" {sum(outcome.left_running for outcome in outcomes)} left running"
    )
    if any(each.lost or each.repeated or each.difference or each.left_running for each in outcomes):
        sys.exit(1)


def _storm_over(name: str, options: argparse.Namespace) -> Outcome:
    strategy, flags = CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        stormy, calm = Path(folder) / "stormy", Path(folder) / "calm"
        sizes = (strategy, options.samples, options.epochs)
        undisturbed(calm, *sizes, flags=flags, has_warm_ranks=options.warm)
        num_traps = options.kills // 2
        first = (list(CONFIGURATIONS).index(name) + options.seed) * num_traps % len(POINTS)
        points = (*POINTS[first:], *POINTS[:first])
        kills = {"num_kills": options.kills, "seed": options.seed, "points": points, "has_warm_ranks": options.warm}
        outcome = storm(stormy, calm, *sizes, **kills, timeout_s=1800, flags=flags)
        print(f"{name} ({', '.join(points[:num_traps])}): {outcome}", flush=True)
        return outcome


if __name__ == "__main__":
    main()
