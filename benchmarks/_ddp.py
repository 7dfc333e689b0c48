"""DDP on two CPU processes over gloo: the loop by hand, Engine and Trainer take turns in the same two processes.

`overhead.py` runs this file under torchrun. The trainers attach to the process group that is there, so that a
round is paired: the same processes, the same connections, the same neighbours on the machine.

Where two processes and the threads of gloo share two cores, a few steps of a run wait for the scheduler, some ten times
as long as a step takes. So there is the median step beside the mean, which has these waits and all that is done once in
many steps.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from _contestants import MLP, QUIET, Case, StepClock, make_loader, settle, trainers
from _ladder import RUNGS, by_rung
from lightning.pytorch import Trainer
from report import Table
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__all__ = ["ddp"]

CASE = Case(key="ddp", name="one logged value", num_logged=1)


def by_hand(steps: int) -> tuple[float, float]:
    """Keeps each loss, which is its log."""
    clock = StepClock(steps)
    module = MLP(CASE, clock)
    model = DistributedDataParallel(module)
    optimizer = module.configure_optimizers()
    logged = []
    for batch in make_loader(steps, DistributedSampler, 2):
        clock.tick()
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged.append(loss.detach())
    return clock.us_per_step, statistics.median(clock.times_us)


def with_jobs(steps: int) -> tuple[float, float]:
    """The loop by hand with the jobs of the ladder: what no loop that keeps the Engine's promises can do without."""
    clock = by_rung(len(RUNGS), steps, 2)
    return clock.us_per_step, statistics.median(clock.times_us)


def by(make: type[Trainer], steps: int) -> tuple[float, float]:
    clock = StepClock(steps)
    make(accelerator="cpu", devices=2, strategy="ddp", **QUIET).fit(MLP(CASE, clock), make_loader(steps, None, 2))
    return clock.us_per_step, statistics.median(clock.times_us)


def rank(rounds: int, steps: int, output: Path) -> None:
    """What each of the two processes does; rank 0 writes its times."""
    dist.init_process_group("gloo")
    runs: dict[str, Callable[[int], tuple[float, float]]] = {"by hand": by_hand}
    runs["by hand, with the jobs of the ladder"] = with_jobs
    runs |= {name: lambda steps, make=make: by(make, steps) for name, make in trainers().items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    order = random.Random(0)  # the same on both ranks
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            gc.collect()
            dist.barrier()
            times[name].append(runs[name](steps))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(times))
    dist.destroy_process_group()


def ddp(rounds: int, steps: int) -> Table:
    """Runs the above, and makes a table of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        arguments = [*launcher, str(rounds), str(steps), str(result)]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        times = json.loads(result.read_text())
    rows = []
    for name, runs in times.items():
        mean_us = statistics.median(mean for mean, _ in runs)
        shares = [_shares(kind, times["by hand"], runs) for kind in (0, 1)]
        rows.append(
            {
                "contestant": name,
                "steps/s": f"{1e6 / mean_us:.0f}",
                "of the loop by hand": shares[0],
                "of it, the median step": shares[1],
            }
        )
    return Table(title="DDP, two processes over gloo, one logged value (steps/s; share of the loop by hand)", rows=rows)


def _shares(kind: int, by_hand: list[list[float]], runs: list[list[float]]) -> str:
    """Speed as a share of the loop by hand's in the same round: median (least to greatest)."""
    ratios = [hand[kind] / own[kind] for hand, own in zip(by_hand, runs, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("output", type=Path)
    settle()
    rank(**vars(parser.parse_args()))
