"""Kills a training job again and again, and looks at what became of it.

    python -m tests.chaos.storm --strategy ddp --kills 20

Victims are drawn at random: a rank, or the agent (torchrun), by SIGKILL, at a random moment. A job whose agent is gone
is started again by the same command. At the end: which samples were trained on how often in each epoch (of steps that
were done twice, because they were not saved, the last time counts), how far the weights are from those of a job that
nobody disturbed, and how long it took from each kill to the next step.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..distributed import ROOT

__all__ = ["JOB", "TORCHRUN", "Job", "Outcome", "judge", "steps_since", "storm", "undisturbed"]

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

    def __str__(self) -> str:
        slowest = f"{max(self.recoveries_s):.1f}" if self.recoveries_s else "-"
        median = f"{sorted(self.recoveries_s)[len(self.recoveries_s) // 2]:.1f}" if self.recoveries_s else "-"
        return (
            f"{self.num_kills} kills in {self.num_steps} steps: {self.lost} samples lost, {self.repeated} repeated,"
            f" max |difference| {self.difference:.1e}, first step after a kill: median {median} s, slowest {slowest} s"
        )


def undisturbed(folder: Path, strategy: str, num_samples: int, num_epochs: int, *, dropout: float = 0.1) -> None:
    """Runs the job once, to its end."""
    with Job(folder, strategy, num_samples, num_epochs, pause_s=0.0, dropout=dropout) as agent:
        if agent.wait(timeout=120):
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
) -> Outcome:
    """Runs the job, kills `num_kills` processes of it, and compares the outcome with that of the job in `calm`."""
    draw = random.Random(seed)
    kills: list[float] = []
    deadline = time.monotonic() + timeout_s
    while not (folder / "weights.pt").exists():
        with Job(folder, strategy, num_samples, num_epochs, pause_s=pause_s) as agent:
            while agent.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {timeout_s} s and {len(kills)} kills:\n{_tail(folder)}")
                if len(kills) >= num_kills or not steps_since(folder, kills[-1] if kills else 0.0):
                    time.sleep(0.02)
                    continue
                time.sleep(draw.uniform(0.0, 1.0))
                if _kill(agent, draw):
                    kills.append(time.time())
    return judge(folder, calm, num_samples, num_epochs, kills)


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
        launcher: Sequence[str] = (*TORCHRUN, "--standalone", "--nproc-per-node=2"),
    ) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [str(folder), strategy, str(num_samples), str(num_epochs), str(pause_s), str(dropout)]
        self._command = [*launcher, str(JOB), *arguments]
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


def _kill(agent: subprocess.Popen, draw: random.Random) -> bool:
    """SIGKILL to a rank, or, one time in five, to the agent."""
    try:
        ranks = [p for p in psutil.Process(agent.pid).children(recursive=True) if str(JOB) in p.cmdline()]
        if not ranks:
            return False
        victim = agent.pid if draw.random() < 0.2 else draw.choice(ranks).pid
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
    parser.add_argument("--strategy", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for strategy in options.strategy:
        with tempfile.TemporaryDirectory() as folder:
            stormy, calm = Path(folder) / "stormy", Path(folder) / "calm"
            sizes = (strategy, options.samples, options.epochs)
            undisturbed(calm, *sizes)
            outcome = storm(stormy, calm, *sizes, num_kills=options.kills, seed=options.seed, timeout_s=1200)
            print(f"{strategy}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
