"""The faults of `doctor.py` that others may see too: `Doctor` beside TraceML and Lightning's `SimpleProfiler`.

Each fault is put once into a run of each tool, of two `ddp` processes on the CPU, with the same module, data, logger
and callback: under the Engine with `Doctor`, under the stock Trainer with TraceML's launcher (left out where
`traceml-ai` is not installed), and under the stock Trainer with `SimpleProfiler`. The report has what each tool says,
in its own words; whether that names the cause; and whether it names the rank.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _doctor_forks import run_in_fork
from _doctor_kinds import HEALTHY, Trial
from report import Table, about, write_report

EXAMPLES = """\
examples:
  pip install traceml-ai && python benchmarks/doctor_beside.py    9 runs of each tool
  python benchmarks/doctor_beside.py --kinds slow_loader healthy  two runs of each
  python benchmarks/doctor_beside.py --tools Doctor TraceML       without the profiler
  python benchmarks/doctor_beside.py --output out                 not into benchmarks/results

Run it on a machine with nothing else to do: what else computes there is found as a fault, and rightly.

What counts as naming the cause:
  Doctor          the most costly finding is of the kind that was put in
  TraceML         its verdict is of that kind; "in part" where it names the side on which the cause lies: RESIDUAL-HEAVY
                  stands for logging, checkpoints, validation and more, a straggler's compute for more samples
  SimpleProfiler  the place of the fault is among the rows of a tenth of the time or more on any rank, without rows that
                  enclose others; "in part" where that row is there in a healthy run, too. It compares no ranks: its
                  reader does, where the place takes a tenth of the time more in that rank's file
A profiler says nothing of a healthy run: its reader judges.
"""
TIMEOUT_S = 600
TOOLS = ("Doctor", "TraceML", "SimpleProfiler")
NUM_PROCESSES = 2
STEP_MS = 80.0
LOST_MS = 40.0
"""In each step, by a fault."""
_IN_PART = "in part"
_BY_HAND = "if its files are compared"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and by which words each tool would name it."""

    rank: int = 1
    """At which it is, where it is at one."""
    strength: float = LOST_MS
    step_ms: float = STEP_MS
    traceml: Sequence[str] = ()
    """Kinds of TraceML's verdicts that name the cause."""
    traceml_in_part: Sequence[str] = ()
    profiler: Sequence[str] = ()
    """Parts of the names of the profiler's actions at which the fault is."""


RESIDUAL = ("RESIDUAL_HEAVY",)
CASES = {
    "slow_loader": Case(traceml=("INPUT_STRAGGLER",), profiler=("train_dataloader_next",)),
    "slow_loaders": Case(traceml=("INPUT_BOUND",), profiler=("train_dataloader_next",)),
    "sleep_in_step": Case(traceml=("COMPUTE_STRAGGLER",), profiler=("training_step",)),
    # The least strength: twice as many samples on that rank.
    "more_samples": Case(strength=10.0, step_ms=STEP_MS / 2, traceml_in_part=("COMPUTE_STRAGGLER",)),
    "slow_callback": Case(traceml_in_part=(*RESIDUAL, "STRAGGLER"), profiler=("Hooks.on_train_batch_end",)),
    # The logger sleeps after each tenth step for as much longer.
    "slow_logger": Case(rank=0, traceml_in_part=(*RESIDUAL, "STRAGGLER"), profiler=("log_metrics",)),
    # Each fourth step saves, for twice the strength.
    "slow_saves": Case(
        strength=2 * LOST_MS, traceml_in_part=RESIDUAL, profiler=("save_checkpoint", "Hooks.on_train_batch_end")
    ),
    "slow_validation": Case(traceml_in_part=RESIDUAL, profiler=("validation_step",)),
    HEALTHY: Case(),
}
_NOTHING_IS_WRONG = ("COMPUTE_BOUND", "NO_CLEAR_PERFORMANCE_BOTTLENECK")
_ENCLOSES = ("run_training_epoch", "run_training_batch", "optimizer_step")
"""Parts of the names of actions in which others happen."""
_LONG_PERCENT = 10.0
"""Of the time: rows of the profiler that take less say nothing."""
_ROW = re.compile(r"^\|\s+(?P<action>.+?)\s+\|(?:\s+[^|]+\|){3}\s+(?P<percent>[\d.e-]+)\s+\|$", re.MULTILINE)
_NAME = re.compile(r"^\[\w+\](?P<owner>\w+)(?:\{.*\})?\.(?P<method>\w+)$")
"""Of an action: its kind, its class, that class's settings if it is a callback, and the method."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a tool says of a run."""

    says: str
    cause: str
    """Whether that names the cause: yes, in part, no."""
    rank: str = "-"
    """Whether it names the rank, of faults at one."""


def trial_of(kind: str, steps: int) -> Trial:
    """The run with this fault."""
    case = CASES[kind]
    strength = 0.0 if kind == HEALTHY else case.strength
    return Trial(
        kind=kind, strategy="ddp", devices=NUM_PROCESSES, rank=case.rank, strength=strength, steps=steps, interval=10,
        step_ms=case.step_ms,
    )  # fmt: skip


def with_doctor(trial: Trial, folder: Path) -> Verdict:
    """The most costly finding."""
    from _doctor_beside import fit_with_doctor

    from polyphase.doctor import judge, read_run

    _finish(partial(fit_with_doctor, trial, folder), folder)
    notes = next(folder.rglob("rank_0.jsonl"))  # with a logger they are in its folder
    findings = judge(read_run(str(notes.parent))).findings
    if not findings:
        return Verdict(says="no finding", cause=_yes(trial.kind == HEALTHY), rank=_named(trial, []))
    first = findings[0]
    says = f"{first.cause}: {first.evidence}"
    return Verdict(says=says, cause=_yes(first.cause == trial.cause), rank=_named(trial, first.ranks))


def with_traceml(trial: Trial, folder: Path) -> Verdict:
    """The verdict of its summary."""
    script = Path(__file__).with_name("_doctor_beside.py")
    command = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", str(script), "--logs-dir", str(folder)]
    command += ["--run-name", "run", f"--nproc-per-node={NUM_PROCESSES}", "--aggregator-port", str(_free_port())]
    command += ["--master-port", str(_free_port()), "--args", json.dumps(asdict(trial)), str(folder)]
    _launch(command, folder)
    return traceml_verdict(json.loads((folder / "run" / "final_summary.json").read_text()), trial)


def traceml_verdict(summary: dict[str, Any], trial: Trial) -> Verdict:
    """The verdict, and the words of why on the card that it prints."""
    primary, case = summary["primary_diagnosis"], CASES[trial.kind]
    kind = primary["kind"]
    why = re.search(r"Why: (.*?)\s*\|?$", summary["text"], re.MULTILINE)
    says = f"{primary['status']} ({primary['severity']}): {why[1] if why else primary['summary']}"
    if trial.kind == HEALTHY:
        return Verdict(says=says, cause=_yes(kind in _NOTHING_IS_WRONG))
    cause = _IN_PART if kind in case.traceml_in_part else _yes(kind in case.traceml)
    return Verdict(says=says, cause=cause, rank=_named(trial, summary["step_time"]["diagnosis"]["ranks"]))


def with_profiler(trial: Trial, folder: Path) -> Verdict:
    """The first rows of each rank's table."""
    from _doctor_beside import fit_with_profiler

    _finish(partial(fit_with_profiler, trial, folder), folder)
    return profiler_verdict([(folder / f"fit-profile-{rank}.txt").read_text() for rank in range(trial.devices)], trial)


def profiler_verdict(reports: Sequence[str], trial: Trial) -> Verdict:
    """Of the tables of all ranks, in their order: the actions of each that enclose no others and take long."""
    actions = [_long_actions(report) for report in reports]
    says = "; ".join(f"rank {rank}: {', '.join(map(_cell, rows))}" for rank, rows in enumerate(actions))
    if trial.kind == HEALTHY:
        return Verdict(says=says, cause="-")
    places = CASES[trial.kind].profiler
    at_place = [
        max((percent for action, percent in rows if any(place in action for place in places)), default=0.0)
        for rows in actions
    ]
    cause = _IN_PART if any(at_place) and "training_step" in places else _yes(any(at_place))
    others = [percent for rank, percent in enumerate(at_place) if rank not in trial.ranks]
    is_seen = bool(trial.ranks) and at_place[trial.rank] >= max(others) + _LONG_PERCENT
    return Verdict(says=says, cause=cause, rank=_BY_HAND if is_seen else "no" if trial.ranks else "-")


def _long_actions(report: str) -> list[tuple[str, float]]:
    rows = [(row["action"], float(row["percent"])) for row in _ROW.finditer(report)]
    return [row for row in rows if row[1] >= _LONG_PERCENT and not any(part in row[0] for part in _ENCLOSES)]


def _cell(row: tuple[str, float]) -> str:
    action, percent = row
    name = _NAME.match(action)
    return f"{'.'.join(name.groups()) if name else action} {percent:.0f} %"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _named(trial: Trial, ranks: Sequence[int]) -> str:
    return _yes(list(ranks) == trial.ranks) if trial.ranks else "-"


def _finish(function: Callable[[], None], folder: Path) -> None:
    _refuse(run_in_fork(function, folder / "log.txt", TIMEOUT_S), folder)


def _refuse(why: str | None, folder: Path) -> None:
    if why is not None:
        log = (folder / "log.txt").read_text(errors="replace")
        raise RuntimeError(f"{why}; the end of what it has written:\n{log[-4000:]}")


def _launch(command: list[str], folder: Path) -> None:
    """Waits for a launcher, which ends its own processes: they are sessions of their own, out of a group's reach."""
    with (folder / "log.txt").open("wb") as log:
        # In the folder there are no settings that the tool would find.
        launcher = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            code: int | None = launcher.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            launcher.terminate()
            launcher.wait()
    _refuse(None if code == 0 else f"it ended with {code}" if code else f"no end after {TIMEOUT_S} s", folder)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


MAKERS: dict[str, Callable[[Trial, Path], Verdict]] = dict(
    zip(TOOLS, (with_doctor, with_traceml, with_profiler), strict=True)
)


def run_all(kinds: Sequence[str], tools: Sequence[str], steps: int, minutes: float) -> dict[tuple[str, str], Verdict]:
    """The verdict on each fault, by each tool, until the time is over."""
    import _doctor_beside  # noqa: F401  # what the forks need is imported once

    import polyphase.doctor  # noqa: F401

    ends = time.monotonic() + 60 * minutes
    verdicts: dict[tuple[str, str], Verdict] = {}
    for kind in kinds:
        for tool in tools:
            if verdicts and time.monotonic() > ends:
                return verdicts
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                verdict = MAKERS[tool](trial_of(kind, steps), Path(folder))
            verdicts[kind, tool] = verdict
            print(f"{time.monotonic() - began:.0f} s  {kind}, {tool}: {verdict}", file=sys.stderr, flush=True)
    return verdicts


def tables(verdicts: dict[tuple[str, str], Verdict]) -> list[Table]:
    """The totals of each tool, and each run."""
    tools = dict.fromkeys(tool for _, tool in verdicts)
    rows = [
        {
            "fault": _title(kind),
            "tool": tool,
            "says": verdict.says.replace("|", "/"),
            "names the cause": verdict.cause,
            "names the rank": verdict.rank,
        }
        for (kind, tool), verdict in verdicts.items()
    ]
    return [Table(title="All", rows=[_totals(tool, verdicts) for tool in tools]), Table(title="Each run", rows=rows)]


def _totals(tool: str, verdicts: dict[tuple[str, str], Verdict]) -> dict[str, str]:
    faults = [verdict for (kind, name), verdict in verdicts.items() if name == tool and kind != HEALTHY]
    at_one = [verdict for verdict in faults if verdict.rank != "-"]
    healthy = verdicts.get((HEALTHY, tool))
    return {
        "tool": tool,
        "faults": f"{len(faults)}",
        "names the cause": f"{sum(verdict.cause == 'yes' for verdict in faults)}",
        "in part": f"{sum(verdict.cause == _IN_PART for verdict in faults)}",
        "faults of one rank": f"{len(at_one)}",
        "names the rank": f"{sum(verdict.rank == 'yes' for verdict in at_one)}",
        _BY_HAND: f"{sum(verdict.rank == _BY_HAND for verdict in at_one)}",
        "finds a healthy run healthy": healthy.cause if healthy else "-",
    }


def _title(kind: str) -> str:
    ranks = trial_of(kind, 1).ranks
    where = f" at rank {ranks[0]}" if ranks else " at all ranks" if kind != HEALTHY else ""
    return f"{kind}{where}"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--kinds", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run begins after that; the report has those made"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser


def main() -> None:
    given = _parser().parse_args()
    load = os.getloadavg()[0]
    note = ""
    if "TraceML" in given.tools:
        if importlib.util.find_spec("traceml_ai"):
            note = f" TraceML {importlib.metadata.version('traceml-ai')}."
        else:
            given.tools.remove("TraceML")
            note = " TraceML is not installed, and left out (pip install traceml-ai)."
    verdicts = run_all(given.kinds, given.tools, given.steps, given.minutes)
    where = about(f"python benchmarks/doctor_beside.py --steps {given.steps}")
    where += f"\n{NUM_PROCESSES} `ddp` processes; load average before: {load:.1f}.{note}\n"
    where += f"A step takes {STEP_MS:.0f} ms without its fault, which adds {LOST_MS:.0f}. {_MEANING}\n"
    title = "Doctor beside TraceML and SimpleProfiler"
    write_report(given.output / "doctor-beside-cpu.md", title, where, tables(verdicts), plot=False)


_MEANING = (
    "What counts as naming the cause is in `python benchmarks/doctor_beside.py --help`. "
    "The faults are those that `Doctor` was made to find, and each was put in once."
)


if __name__ == "__main__":
    main()
