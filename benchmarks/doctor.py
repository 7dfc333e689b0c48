"""Faults that are put into runs: does `Doctor` name the cause and the rank? And what does it cost?

Each run is a process of its own, of a few seconds: a fault of some kind and strength, at a random rank, under a random
strategy of those that can have it, with 2 to 4 ranks; and healthy runs. The table has, for each kind, how often the
most costly finding was its cause and its rank, and what else it was taken for. Overhead is measured by pairs of runs
with and without the callback, in alternation, in one process with one thread.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from report import Table, about, write_report

EXAMPLES = """\
examples:
  python benchmarks/doctor.py                              200 faults, 40 healthy runs: an hour on 4 cores
  python benchmarks/doctor.py --quick --output out         does it run? its figures mean nothing
  python benchmarks/doctor.py --kinds slow_loader padding  some of them

Run it on a machine with nothing else to do: what else computes there is found as a fault, and rightly.
"""
REPLICAS = ("ddp", "zero1", "fsdp", "local_sgd:every=2")
EVERY = (*REPLICAS, "tp", "pp", "hsdp:replicate=2")
PIPES, ALONE = ("pp",), ("single",)
TIMEOUT_S = 180


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what the doctor is to say of it."""

    cause: str
    strategies: Sequence[str]
    at_one_rank: bool = True
    strengths_ms: tuple[float, float] = (10.0, 60.0)
    """The least and the most that it costs in a step."""


KINDS = {
    "slow_loader": Kind(cause="slow_loader", strategies=REPLICAS),
    "slow_loaders": Kind(cause="slow_loader", strategies=(*REPLICAS, "single"), at_one_rank=False),
    "sleep_in_step": Kind(cause="slow_rank", strategies=(*REPLICAS, "tp", "hsdp:replicate=2")),
    "heavy_step": Kind(cause="slow_rank", strategies=REPLICAS),
    "slow_stage": Kind(cause="unequal_stages", strategies=PIPES),
    "more_samples": Kind(cause="uneven_data", strategies=("ddp", "zero1")),
    "slow_callback": Kind(cause="slow_callback", strategies=EVERY),
    "slow_callbacks": Kind(cause="slow_callback", strategies=(*EVERY, "single"), at_one_rank=False),
    "slow_logger": Kind(cause="slow_logging", strategies=("ddp", "fsdp", "single")),
    "slow_saves": Kind(cause="checkpoint_stall", strategies=("ddp", "local_sgd:every=2", "single"), at_one_rank=False),
    "slow_validation": Kind(cause="slow_validation", strategies=("ddp", "fsdp", "single"), at_one_rank=False),
    "padding": Kind(cause="padding", strategies=("ddp", "fsdp", "single"), at_one_rank=False),
    "slow_transfer": Kind(cause="slow_copy", strategies=("ddp", "fsdp", "single"), at_one_rank=False),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run; `kind` is None in a healthy one."""

    kind: str | None
    strategy: str
    devices: int
    rank: int
    cost_s: float
    steps: int


def trials(kinds: Sequence[str], num_faults: int, num_healthy: int, steps: int, most_ranks: int) -> list[Trial]:
    """The runs, the same ones each time."""
    dice = random.Random(0)
    found = []
    for number in range(num_faults + num_healthy):
        kind = kinds[number % len(kinds)] if number < num_faults else None
        row = KINDS[kind] if kind is not None else None
        strategy = dice.choice(row.strategies if row is not None else EVERY)
        devices = 1 if strategy == "single" else 4 if strategy.startswith("hsdp") else dice.randint(2, most_ranks)
        if strategy in ("tp", "pp"):
            devices = 2
        cost_s = dice.uniform(*row.strengths_ms) / 1e3 if row is not None else 0.0
        rank = {"slow_logger": 0, "slow_stage": devices - 1}.get(kind or "", dice.randrange(devices))
        found.append(Trial(kind=kind, strategy=strategy, devices=devices, rank=rank, cost_s=cost_s, steps=steps))
    return found


def run_trial(trial: Trial) -> tuple[str, list[int]]:
    """Cause and ranks of the most costly finding; ``"none"`` where there was none, ``"error"`` where the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--trial", json.dumps(asdict(trial)), "--output", folder]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return "error", []
        if ended.returncode:
            print(ended.stderr[-2000:], file=sys.stderr)
            return "error", []
        from polyphase.engine.doctor import judge, read_run

        findings = judge(read_run(folder)).findings
    return (findings[0].cause, list(findings[0].ranks)) if findings else ("none", [])


def is_right(trial: Trial, cause: str, ranks: list[int]) -> bool:
    """Whether it is the cause, at the rank."""
    if trial.kind is None:
        return cause == "none"
    row = KINDS[trial.kind]
    expected = [trial.rank] if row.at_one_rank and trial.devices > 1 else []
    return cause == row.cause and (ranks == expected or not row.at_one_rank)


def matrix(given: list[Trial]) -> Table:
    """Runs all, and counts."""
    said: dict[str, Counter[str]] = {}
    right: Counter[str] = Counter()
    for number, trial in enumerate(given, start=1):
        cause, ranks = run_trial(trial)
        kind = trial.kind or "healthy"
        is_good = is_right(trial, cause, ranks)
        right[kind] += is_good
        said.setdefault(kind, Counter())[cause if is_good or cause == "error" else f"{cause} at {ranks or 'all'}"] += 1
        verdict = "right" if is_good else f"wrong: {cause} at {ranks or 'all'}"
        print(f"  {number}/{len(given)} {trial}: {verdict}", file=sys.stderr, flush=True)
    rows = []
    for kind, counts in said.items():
        total = counts.total()
        texts = ", ".join(f"{count} {cause}" for cause, count in counts.most_common())
        rows.append({"fault": kind, "runs": f"{total}", "right": f"{right[kind]}", "said": texts})
    faults = [row for row in rows if row["fault"] != "healthy"]
    all_right = sum(int(row["right"]) for row in faults)
    all_runs = sum(int(row["runs"]) for row in faults)
    rows.append({"fault": "all faults", "runs": f"{all_runs}", "right": f"{all_right}", "said": ""})
    return Table(title="Cause and rank", rows=rows)


def overhead(rounds: int, steps: int) -> Table:
    """Microseconds that the callback adds to a step, by pairs of runs."""
    from _doctor_runs import step_us

    added = [step_us(True, steps) - step_us(False, steps) for _ in range(rounds)]
    median, least, most = statistics.median(added), min(added), max(added)
    row = {"step": "linear, batch 4, one process", "added, us": f"{median:.1f} ({least:.1f} to {most:.1f})"}
    return Table(title="What it adds to a step", rows=[row | {"of a 10 ms step": f"{median / 1e4:.2%}"}])


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--most-ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trial is not None:
        from _doctor_runs import run

        run(Trial(**json.loads(given.trial)), given.output)
        return
    if given.quick:
        given.faults, given.healthy, given.steps, given.most_ranks, given.rounds = len(given.kinds), 1, 24, 2, 1
    began = time.time()
    table = matrix(trials(given.kinds, given.faults, given.healthy, given.steps, given.most_ranks))
    added = overhead(given.rounds, 300 if given.quick else 2000)
    where = about(f"python benchmarks/doctor.py, {time.time() - began:.0f} s")
    write_report(given.output / "doctor.md", "Doctor: injected faults", where, [table, added], plot=False)


if __name__ == "__main__":
    main()
