"""What a trainer costs per step, against a loop written by hand: Engine, Lightning's Trainer, Fabric, Accelerate.

Each round runs every contestant once, in a new order, in one process with one thread; a figure is the median over the
rounds. A contestant's own time is its time per step minus that of the hand-written loop in the same round. The time is
taken between two steps in mid-epoch, so that starting up is not in it. Then DDP on two processes, and starting up.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _contestants import CASES, Case, Contestant, contestants, settle, trainers
from _ddp import ddp
from _ladder import ladder
from report import Table, about, write_report

EXAMPLES = """\
examples:
  python benchmarks/overhead.py                         all of it, into benchmarks/results: less than 5 minutes
  python benchmarks/overhead.py --quick --output out    does it run? its figures mean nothing
  python benchmarks/overhead.py --cases one ddp         two parts of it, for work on one of them

Run it on a machine with nothing else to do. Read the ranges: where that of a ratio is wide, give more --rounds.
"""
OTHERS = {
    "ladder": "what the own time consists of",
    "ddp": "steps/s on two processes",
    "startup": "imports, and from fit to the first step",
}


def times_of(known: dict[str, Contestant], case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds per step of each contestant, round by round; none for those that sit the case out."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in known}
    for _ in range(rounds):
        for name in order.sample(list(known), len(known)):
            gc.collect()  # nobody pays for what the one before left
            if (us := known[name](case, steps)) is not None:
                times[name].append(us)
    return times


def row_of(case: Case, times: dict[str, list[float]]) -> dict[str, str]:
    """One line of the table: own times, and the trainers' ratio by round."""
    hand = times["by hand"]
    own = {name: [t - h for t, h in zip(us, hand, strict=True)] for name, us in times.items() if us}
    ratios = [engine / stock for engine, stock in zip(own["Engine"], own["Trainer"], strict=True)]
    row = {"case": case.name, "by hand, us": f"{statistics.median(hand):.0f}"}
    row |= {f"{name}, us": spread(own[name]) if name in own else "" for name in times if name != "by hand"}
    row["Engine / Trainer"] = spread(ratios, 3)
    print(f"  {case.name}: {row['Engine / Trainer']}", file=sys.stderr, flush=True)
    return row


def spread(values: list[float], digits: int = 0) -> str:
    """Median (least to greatest)."""
    median, least, greatest = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return f"{median} ({least} to {greatest})"


def cpu_steps(cases: tuple[Case, ...], rounds: int, steps: int) -> Table:
    known = contestants()
    rows = [row_of(case, times_of(known, case, rounds, steps)) for case in cases]
    title = (
        "Own time per micro-batch: one CPU process, MLP 32-64-10, batch 8, SGD (medians; min to max over the rounds)"
    )
    return Table(title=title, rows=rows)


def startup(rounds: int) -> Table:
    """Both trainers from a fresh interpreter each, in a new order every round."""
    order = random.Random(0)
    imports: dict[str, list[float]] = {name: [] for name in trainers()}
    firsts: dict[str, list[float]] = {name: [] for name in trainers()}
    child = Path(__file__).with_name("_startup.py")
    for _ in range(rounds):
        for name in order.sample(list(imports), len(imports)):
            finished = subprocess.run([sys.executable, child, name], check=True, stdout=subprocess.PIPE, text=True)
            import_s, first_s = json.loads(finished.stdout.splitlines()[-1])
            imports[name].append(import_s)
            firsts[name].append(first_s * 1e3)
    extra = [engine - stock for engine, stock in zip(imports["Engine"], imports["Trainer"], strict=True)]
    rows = {
        "import lightning.pytorch, s": spread(imports["Trainer"], 2),
        "import polyphase.engine, which imports that, s": spread(imports["Engine"], 2),
        "the difference, s": spread(extra, 2),
    }
    rows |= {f"{name}.fit to first training_step, ms": spread(ms, 1) for name, ms in firsts.items()}
    title = "Starting up, in fresh interpreters (medians; min to max over the rounds)"
    return Table(title=title, rows=[{"what": what, "time": value} for what, value in rows.items()])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; those not given are filled in."""
    keys = "; ".join(f"{k}: {v}" for k, v in {**{c.key: c.name for c in CASES}, **OTHERS}.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=_positive, help="alternating rounds (default: 7; at least 5 for a claim)")
    parser.add_argument("--steps", type=_positive, help="steps that are timed in each run (default: 600)")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 50 steps, where these are not given")
    parser.add_argument("--cases", nargs="+", metavar="CASE", choices=[c.key for c in CASES] + list(OTHERS), help=keys)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.steps = options.steps or (50 if options.quick else 600)
    return options


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def command(options: argparse.Namespace) -> str:
    """What to type to have the report again, but for where it goes."""
    parts = ["python benchmarks/overhead.py", f"--rounds {options.rounds}", f"--steps {options.steps}"]
    if options.cases:
        parts.append(f"--cases {' '.join(options.cases)}")
    return " ".join(parts)


def uncommitted() -> str:
    """A line that says so where what is measured is not what the commit has."""
    packages = ["engine", "callbacks", "models", "benchmarks/*.py"]
    status = ["git", "status", "--porcelain", "--", *packages]
    changed = subprocess.run(status, cwd=Path(__file__).parents[1], capture_output=True, text=True).stdout
    return "\nWith changes that are not committed.\n" if changed else ""


def main() -> None:
    options = parse()
    settle()
    cases = tuple(case for case in CASES if not options.cases or case.key in options.cases)
    where = about(command(options)) + uncommitted()
    tables = []
    if cases and not importlib.util.find_spec("accelerate"):
        where += "\nAccelerate is not installed, so it is not among the contestants.\n"
    if cases:
        tables.append(cpu_steps(cases, options.rounds, options.steps))
    if not options.cases or "ladder" in options.cases:
        tables.append(ladder(options.rounds, options.steps))
    if not options.cases or "ddp" in options.cases:
        tables.append(ddp(options.rounds, max(1, options.steps // 2)))
    if not options.cases or "startup" in options.cases:
        tables.append(startup(min(5, options.rounds)))
    path = options.output / "overhead-cpu.md"
    if cases:
        write_report(path, "Overhead per step", where, tables)
    else:  # no own times, so nothing to plot
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["# Overhead per step\n", where, *map(str, tables)]))
        print(path.read_text())


if __name__ == "__main__":
    main()
