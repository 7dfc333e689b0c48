"""Faults that are put into runs: does `Doctor` name the cause and the rank? And what does it cost?

Each run is a fork of this process, of a few seconds: a fault of some kind and strength, at a random rank, under the
strategies that can have it in turn, with 2 to 4 ranks; and healthy runs among them. The table has, for each kind, how
often the most costly finding was its cause, and at its rank, and what else it was taken for. Of each kind that has a
remedy by which a step gets shorter, one run is made once more with it, right after, and the time that it saves is put
beside what the finding forecasts. What it costs is measured
by pairs of blocks of steps with and without the callback, in alternation, in one run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _doctor_forks import run_in_fork
from _doctor_gains import REMEDIES, Gain, gains_table, num_within
from _doctor_kinds import HEALTHY, KINDS, Trial, trials
from report import Table, about, write_report

EXAMPLES = """\
examples:
  python benchmarks/doctor.py                              200 faults, 40 healthy runs: 20 minutes on 2 cores
  python benchmarks/doctor.py --minutes 10                 those of them that fit in
  python benchmarks/doctor.py --minutes 8 --pieces done    all, by a call again and again: `done` has what was made
  python benchmarks/doctor.py --quick --output out         one of each kind
  python benchmarks/doctor.py --cost                       only what it costs
  python benchmarks/doctor.py --kinds slow_loader padding  some of them
  python benchmarks/doctor.py --gains --output out         one of each kind that has a remedy, and that

Run it on a machine with nothing else to do: what else computes there is found as a fault, and rightly.
"""
TIMEOUT_S = 90


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run, and the most costly finding on it."""

    trial: Trial
    cause: str
    """``"none"`` where there was no finding, ``"error"`` where the run failed."""
    ranks: list[int] = field(default_factory=list)
    evidence: str = ""
    is_among: bool = False
    """Whether any finding is the right one."""
    wall_s: float
    step_s: float = 0.0
    forecast: float | None = None
    """The gain by the finding that is right; None where there is none."""

    @property
    def has_cause(self) -> bool:
        """Whether the cause is right."""
        return self.cause == self.trial.cause

    @property
    def is_right(self) -> bool:
        """Whether the ranks are, too."""
        return self.has_cause and (self.ranks == self.trial.ranks or not self.trial.ranks)

    @property
    def said(self) -> str:
        """The cause, and the ranks where they are wrong."""
        return self.cause if self.is_right or self.cause in ("none", "error") else f"{self.cause} at {self._where}"

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self.ranks)) or "all"


def run_trial(trial: Trial) -> Outcome:
    """Runs one, and has its notes judged."""
    from _doctor_runs import run

    from polyphase.doctor import judge, read_run

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        why = run_in_fork(partial(run, trial, Path(folder)), log, TIMEOUT_S)
        wall_s = time.monotonic() - began
        notes = sorted(Path(folder).rglob("rank_0.jsonl"))  # with a logger they are in its folder
        if why is None and not notes:
            why = "it noted nothing"
        if why is not None:
            print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
            return Outcome(trial=trial, cause="error", evidence=why, wall_s=wall_s)
        verdict = judge(read_run(str(notes[0].parent)))
    given = partial(Outcome, trial=trial, wall_s=wall_s, step_s=verdict.figures.step_s)
    outcomes = [
        given(cause=each.cause, ranks=list(each.ranks), evidence=each.evidence, forecast=each.gain)
        for each in verdict.findings
    ]
    first = outcomes[0] if outcomes else given(cause="none")
    right = next((each for each in outcomes if each.is_right), None)
    return replace(first, is_among=right is not None, forecast=None if right is None else right.forecast)


def mend(outcome: Outcome) -> Gain | None:
    """Makes a run once more with its remedy; None where that failed."""
    assert outcome.forecast is not None
    mended = run_trial(replace(outcome.trial, is_mended=True))
    if mended.cause == "error":
        return None
    return Gain(
        trial=outcome.trial, forecast=outcome.forecast, step_s=outcome.step_s, mended_s=mended.step_s
    )  # fmt: skip


class Pieces:
    """What was made so far, by this call and by earlier ones with the same file: a line for each run.

    Args:
        path: of the file; None: of this call alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.outcomes: list[Outcome] = []
        self.gains: dict[str, Gain] = {}
        self.loads: list[float] = []
        """The load average before each call."""
        self.took_s = 0.0
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            self._keep(json.loads(line))

    def add(self, **made: Any) -> None:
        """Adds an ``outcome``, a ``gain`` or a ``load``, with the seconds that it ``took``."""
        line = json.dumps({name: value if isinstance(value, float) else asdict(value) for name, value in made.items()})
        self._keep(json.loads(line))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{line}\n")

    def _keep(self, made: dict[str, Any]) -> None:
        self.took_s += made.get("took", 0.0)
        if "load" in made:
            self.loads.append(made["load"])
            return
        given = made.get("outcome") or made["gain"]
        given["trial"] = Trial(**given["trial"])
        if "outcome" in made:
            self.outcomes.append(Outcome(**given))
        else:
            self.gains[given["trial"].kind] = Gain(**given)


def run_all(given: Sequence[Trial], minutes: float, pieces: Pieces) -> None:
    """Runs them until the time is over; and the first of each kind that is right once more, with its remedy."""
    import _doctor_runs  # noqa: F401  # what the forks need is imported once

    import polyphase.doctor  # noqa: F401

    ends = time.monotonic() + 60 * minutes
    left = list(given)
    for done in pieces.outcomes:
        left.remove(done.trial)
    first = len(pieces.outcomes) + 1
    for number, trial in enumerate(left, start=first):
        if number > first and time.monotonic() > ends:
            break
        outcome = run_trial(trial)
        pieces.add(outcome=outcome, took=outcome.wall_s)
        verdict = "right" if outcome.is_right else f"WRONG, {outcome.said}: {outcome.evidence}"
        print(f"{number}/{len(given)} {outcome.wall_s:.1f} s  {trial}: {verdict}", file=sys.stderr, flush=True)
        if trial.kind in REMEDIES and trial.kind not in pieces.gains and outcome.forecast is not None:
            began = time.monotonic()
            gain = mend(outcome)
            if gain is not None:
                pieces.add(gain=gain, took=time.monotonic() - began)
                forecast = f"{gain.forecast:.1%} forecast, {gain.measured:.1%} measured"
                print(f"  mended: {forecast}", file=sys.stderr, flush=True)


def tables(outcomes: Sequence[Outcome], gains: Sequence[Gain]) -> list[Table]:
    """The totals, those by kind and by strategy, each run that was judged wrongly, and the gains."""
    faults = [each for each in outcomes if each.trial.kind != HEALTHY]
    healthy = [each for each in outcomes if each.trial.kind == HEALTHY]
    kinds = dict.fromkeys(each.trial.kind for each in faults)
    strategies = sorted({each.trial.strategy for each in outcomes})
    rows = [_row("fault", kind, [each for each in faults if each.trial.kind == kind]) for kind in kinds]
    if healthy:
        rows.append(_row("fault", HEALTHY, healthy))
    wrong = [
        {"run": str(each.trial), "said": each.said, "evidence": each.evidence.replace("|", "/")}
        for each in outcomes
        if not each.is_right
    ]
    found = [
        Table(title="All", rows=[_totals(faults, healthy) | {"gains within 20 % of the forecast": num_within(gains)}]),
        Table(title="By fault: the most costly finding", rows=rows),
        Table(
            title="By strategy",
            rows=[_row("strategy", name, [o for o in outcomes if o.trial.strategy == name]) for name in strategies],
        ),
    ]
    if wrong:
        found.append(Table(title="Each that was judged wrongly", rows=wrong))
    return [*found, gains_table(gains)] if gains else found


def _totals(faults: Sequence[Outcome], healthy: Sequence[Outcome]) -> dict[str, str]:
    at_one = [each for each in faults if each.trial.ranks]
    return {
        "faults": f"{len(faults)}",
        "kinds": f"{len({each.trial.kind for each in faults})}",
        "right cause": _percent([each.has_cause for each in faults]),
        "faults of one rank": f"{len(at_one)}",
        "right cause and rank there": _percent([each.is_right for each in at_one]),
        "right cause and rank": _percent([each.is_right for each in faults]),
        "it is among the findings": _percent([each.is_among for each in faults]),
        "healthy runs": f"{len(healthy)}",
        "false alarms": f"{sum(not each.is_right for each in healthy)}",
    }


def _percent(are: Sequence[bool]) -> str:
    return f"{sum(are) / len(are):.1%}" if are else ""


def _row(name: str, value: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    counts = Counter(each.said for each in outcomes)
    return {
        name: value,
        "runs": f"{len(outcomes)}",
        "right cause": f"{sum(each.has_cause for each in outcomes)}",
        "right cause and rank": f"{sum(each.is_right for each in outcomes)}",
        "among the findings": f"{sum(each.is_among for each in outcomes)}",
        "said": ", ".join(f"{count} {said}" for said, count in counts.most_common()),
    }


def overhead(pairs: int) -> Table:
    """What the callback adds to a step, by pairs of blocks of steps with and without it, in one run."""
    from _doctor_cost import FORMS, added_us

    rows = []
    for form in FORMS:
        found = added_us(form, pairs)
        row = {"form": form, "pairs": f"{len(found.on_us)}"}
        row["a step without it, us"] = f"{statistics.median(found.off_us):.0f}"
        row["added, us: median of the pairs"] = _interval(found.pairs_us)
        row["added, us: quickest tenth of the blocks"] = f"{found.quiet_us:.1f}"
        row["the end of an interval, us"] = f"{found.note_us:.0f}" if found.notes_us else ""
        row["its steps"] = f"{found.interval_steps}" if found.notes_us else ""
        row["added with a step's share of that, us"] = f"{found.all_us:.1f}"
        rows.append(row)
        print(f"  {row}", file=sys.stderr, flush=True)
    title = "CPU time added to a step: linear layer, batch 4, one process, one thread, CSVLogger"
    return Table(title=title, rows=rows)


def _interval(values: list[float]) -> str:
    """Median, and its 95 % interval by the order of the values."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low = ordered[max(0, int(len(ordered) / 2 - half))]
    high = ordered[min(len(ordered) - 1, int(len(ordered) / 2 + half))]
    return f"{statistics.median(ordered):.1f} ({low:.1f} to {high:.1f})"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=40)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run begins after that; the report says how many did"
    )
    parser.add_argument(
        "--pieces", type=Path, help="a file of what was made, which the next call with the same arguments goes on with"
    )
    parser.add_argument("--pairs", type=int, default=500, help="pairs of blocks by which the cost is measured")
    parser.add_argument("--cost", action="store_true", help="only what it costs, into doctor-cost-cpu.md: 5 minutes")
    parser.add_argument("--gains", action="store_true", help="one run of each kind that has a remedy, and that")
    parser.add_argument("--seed", type=int, default=0, help="of other strengths, ranks and numbers of them")
    parser.add_argument("--quick", action="store_true", help="one run of each kind, and one healthy one")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser


def _pieces(given: argparse.Namespace) -> str:
    return "" if given.pieces is None else f" --pieces {given.pieces.name}"


def main() -> None:
    given = _parser().parse_args()
    if given.gains:
        given.kinds = [kind for kind in given.kinds if kind in REMEDIES]
        given.faults, given.healthy = len(given.kinds), 0
    if given.quick:
        given.faults, given.healthy, given.pairs = len(given.kinds), 1, 10
    if given.cost:
        added = overhead(given.pairs)
        where = about(f"python benchmarks/doctor.py --cost --pairs {given.pairs}")
        write_report(given.output / "doctor-cost-cpu.md", "Doctor: what it costs", where, [added], plot=False)
        return
    wanted = trials(given.kinds, given.faults, given.healthy, given.seed)
    pieces = Pieces(given.pieces)
    pieces.add(load=os.getloadavg()[0])
    run_all(wanted, given.minutes, pieces)
    where = about(f"python benchmarks/doctor.py --minutes {given.minutes:g} --seed {given.seed}{_pieces(given)}")
    loads = ", ".join(f"{load:.1f}" for load in pieces.loads)
    made = f"{len(pieces.outcomes)} of {len(wanted)} runs were made, in {pieces.took_s:.0f} s"
    where += f"\n{made}; load average before: {loads}.\n"
    found = tables(pieces.outcomes, list(pieces.gains.values()))
    write_report(given.output / "doctor-cpu.md", "Doctor: injected faults", where, found, plot=False)


if __name__ == "__main__":
    main()
