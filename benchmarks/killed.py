"""One run that is killed nine times beside the same run that nobody disturbs: ``python -m benchmarks.killed``.

ByteGPT learns Python's own source with ``ddp`` on two processes of one CPU. Each third of the kills hits rank 0, rank 1
or the launcher, by SIGKILL, at a random step; a launcher that is gone is started again by the same command. Written are
the loss of each step and when it was done, a table of the kills, and the largest difference of a loss and of a weight.
"""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, seed_everything
from safetensors.torch import load_file

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource

from .report import Table, about, write_report

RESULTS = Path(__file__).parent / "results"
NUM_STEPS = 600
VICTIMS = ("rank 0", "rank 1", "launcher")
KILLS = [(60 * number, VICTIMS[number % 3]) for number in range(1, 10)]
"""The step at which to strike, at least, and whom."""
COMMAND = (sys.executable, "-m", "polyphase.engine", "launch", "--max-restarts", "20", "--nproc")


class Done(NamedTuple):
    """A step, as rank 0 noted it."""

    time: float
    step: int
    loss: float
    process: int


class Notes(Callback):
    """Rank 0 writes a line for each step; each rank writes its process number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"rank {trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            with (self.folder / "steps").open("a") as file:
                file.write(f"{time.time()} {trainer.global_step} {float(outputs['loss'])!r} {os.getpid()}\n")


def job(folder: Path, **flags: Any) -> None:
    """The script of a user, which `launch` starts on each rank; `flags` are more of the engine's."""
    seed_everything(0)
    engine = Engine(
        strategy="ddp",
        accelerator="cpu",
        resume="auto",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[Snapshot(folder / "snapshots", every_n_steps=10), Notes(folder)],
        **{"max_steps": NUM_STEPS, **flags},
    )
    engine.fit(ByteGPT(num_layers=2, num_heads=4, dim=96, context_length=64), PythonSource(64, 8))
    engine.export(folder / "weights.safetensors")


def steps_of(folder: Path) -> list[Done]:
    """All steps that were done, in order of time; a line that a kill has cut is left out."""
    path = folder / "steps"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Done(float(line[0]), int(line[1]), float(line[2]), int(line[3])) for line in lines if len(line) == 4]


def start(folder: Path, num_ranks: int = 2, **flags: Any) -> subprocess.Popen[bytes]:
    """Starts the job, or goes on with it."""
    words = [*COMMAND, str(num_ranks), "--", "-m", "benchmarks.killed", str(folder), json.dumps(flags)]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run(folder: Path, kills: list[tuple[int, str]], num_ranks: int = 2, **flags: Any) -> list[tuple[float, int, str]]:
    """Runs the job to its end; returns time, step and victim of each kill."""
    chance, struck = random.Random(0), []
    process = start(folder, num_ranks, **flags)
    for at, victim in kills:
        at += chance.randrange(40)
        while (step := max((done.step for done in steps_of(folder)), default=0)) < at:
            assert process.poll() is None, (folder / "output").read_text()[-3000:]
            time.sleep(0.01)
        struck.append((time.time(), step, victim))
        is_launcher = victim == "launcher"
        os.kill(process.pid if is_launcher else int((folder / victim).read_text()), signal.SIGKILL)
        if is_launcher:
            process.wait()
            process = start(folder, num_ranks, **flags)
    assert process.wait() == 0, (folder / "output").read_text()[-3000:]
    return struck


def table_of(kills: list[tuple[float, int, str]], steps: list[Done]) -> Table:
    """What each kill cost; ranks whose launcher was killed do a few more steps before they end."""
    rows = []
    for number, (at, step, victim) in enumerate(kills, 1):
        ended = [done for done in steps if done.time <= at][-1].process
        reached = max(done.step for done in steps if done.process == ended)
        first_new = next(done for done in steps if done.time > at and done.process != ended and done.step > reached)
        again = sum(done.process == first_new.process and done.step <= reached for done in steps)
        rows.append(
            {
                "kill": str(number),
                "at step": str(step),
                "killed": victim,
                "steps done again": str(again),
                "seconds until the next new step": f"{first_new.time - at:.1f}",
            }
        )
    return Table(title="Kills", rows=rows)


def main() -> None:
    """Both runs, one after the other, and their report."""
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder, "calm"), Path(folder, "killed")
        calm.mkdir()
        killed.mkdir()
        run(calm, [])
        kills = run(killed, KILLS)
        done = {"undisturbed": steps_of(calm), "killed": steps_of(killed)}
        weights = [load_file(path / "weights.safetensors") for path in (calm, killed)]
    losses = [{step.step: step.loss for step in steps} for steps in done.values()]
    assert losses[0].keys() == losses[1].keys() == set(range(1, NUM_STEPS + 1))
    difference = max(abs(losses[0][step] - losses[1][step]) for step in losses[0])
    moved = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    rows = []
    for name, steps in done.items():
        seconds = f"{steps[-1].time - steps[0].time:.1f}"
        rows.append({"run": name, "steps": str(len(steps)), "seconds": seconds, "last loss": f"{steps[-1].loss:.6f}"})
    equal = (
        {"largest difference of": "a loss", "": f"{difference:.1e}"},
        {"largest difference of": "a weight", "": f"{moved:.1e}"},
    )
    tables = [Table(title="Runs", rows=rows), Table(title="Difference", rows=[*equal]), table_of(kills, done["killed"])]
    write_report(
        RESULTS / "killed-cpu.md",
        "A job that is killed nine times",
        about("python -m benchmarks.killed"),
        tables,
        plot=False,
    )
    with (RESULTS / "killed-cpu.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "second", "step", "loss"])
        for name, steps in done.items():
            writer.writerows((name, f"{s.time - steps[0].time:.2f}", s.step, f"{s.loss:.4f}") for s in steps)


if __name__ == "__main__":
    job(Path(sys.argv[1]), **json.loads(sys.argv[2])) if sys.argv[1:] else main()
