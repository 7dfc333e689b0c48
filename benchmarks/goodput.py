"""How much of its time a run that loses ranks trains: measured on this machine, and simulated for 16,384 ranks.

    python -m benchmarks.goodput                                    both; 10 minutes on 2 cores
    python -m benchmarks.goodput --only simulated                   the simulation alone; seconds
    python -m benchmarks.goodput --only simulated --ranks 1024 --restart 300 --save 20

Goodput is the useful steps per second of wall time, of those of the run that nobody disturbs. Not useful: to wait in a
save, to notice a loss, to restart or to regroup, to make steps again, and the part of the ranks that is gone.

Measured: a run of four ranks that is killed three times (SIGKILL, another rank each time), once with a restart of all
ranks after each kill, once with ``on_rank_loss="continue"``.

Simulated: failures come at random, independently of each other, at the rate of 419 unexpected interruptions in 54 days
on 16,384 GPUs (Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4). 54 of the 419 were bugs of
the software: an exception is no lost rank, so these end the run under each of the policies:

  restart          all ranks begin again from the newest snapshot
  return           those left go back to it in the same processes: fsdp, hsdp and zero1
  go on            those left make the step again: ddp

Lost ranks stay away until the next restart. With --renew K there is one after K losses, which saves first, so that no
step is made again. A failure during a restart, a return or a save has it begin again.

The costs are those that were measured on this machine (`killed-cpu.md`, `without-restart-cpu.md`, `clusters-cpu.md`,
`checkpoint-cpu.md`), of small models. A restart of thousands of ranks takes longer: give your own figures.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from . import killed
from .report import Table, about, write_report

__all__ = ["POLICIES", "Costs", "Outcome", "best_interval", "closed_form", "simulate", "young"]

RESULTS = Path(__file__).parent / "results"
POLICIES = ("restart", "return", "go on")
LLAMA_RANKS, LLAMA_S, LLAMA_FAILURES, LLAMA_BUGS = 16_384, 54 * 86_400.0, 419, 54
INTERVALS_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
NUM_FAILURES = 4000
"""In a simulated run; the standard error of what a failure costs is then about 2 %."""

NUM_RANKS, NUM_STEPS, KILLS = 4, 1200, [(300, "rank 1"), (600, "rank 0"), (900, "rank 2")]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What failures and saves cost."""

    mtbf_s: float = LLAMA_S / LLAMA_FAILURES
    """Mean time between two failures of the whole job, however many ranks it has left."""
    fatal: float = LLAMA_BUGS / LLAMA_FAILURES
    """The part of the failures that end the run."""
    width: float = 8 / LLAMA_RANKS
    """The part of the ranks that a loss takes along: a host of 8."""
    save_s: float = 0.07
    """For how long training waits in a save: 1 GiB for each rank, written in the background."""
    notice_s: float = 24.0
    """Until a powered-off host counts as lost."""
    restart_s: float = 15.0
    """Ends the processes, starts them, imports, meets, and reads the snapshot."""
    return_s: float = 1.3
    regroup_s: float = 0.1
    """With the step that is made again."""


@dataclass
class Outcome:
    """Where the time of a simulated run went, in seconds."""

    useful_s: float = 0.0
    """Of all ranks: with a part of them, as much less."""
    saves_s: float = 0.0
    recoveries_s: float = 0.0
    again_s: float = 0.0
    """In steps that were made again."""
    absent_s: float = 0.0
    """Of the ranks that were gone."""
    num_failures: int = 0

    @property
    def wall_s(self) -> float:
        return self.useful_s + self.saves_s + self.recoveries_s + self.again_s + self.absent_s

    @property
    def goodput(self) -> float:
        return self.useful_s / self.wall_s


class _Run:
    """A simulated run: time passes in pieces, each of which ends well or by a failure."""

    def __init__(self, costs: Costs, policy: str, interval_s: float, renew: int | None, seed: int) -> None:
        self.costs, self.policy, self.interval_s, self.renew = costs, policy, interval_s, renew
        self.draw, self.outcome = random.Random(seed), Outcome()
        self.left_s = self.draw.expovariate(1 / costs.mtbf_s)
        """Until the next failure."""
        self.num_lost, self.unsaved_s = 0, 0.0

    def spend(self, duration_s: float) -> tuple[float, bool]:
        """Lets time pass; returns how much did, and whether a failure has ended it."""
        if self.left_s > duration_s:
            self.left_s -= duration_s
            return duration_s, False
        spent_s, self.left_s = self.left_s, self.draw.expovariate(1 / self.costs.mtbf_s)
        self.outcome.num_failures += 1
        return spent_s, True

    def train(self) -> bool:
        """Steps and saves until the next failure; returns whether there was none in the last interval."""
        whole_s = self.interval_s + self.costs.save_s
        num_whole = int(self.left_s // whole_s)  # intervals, passed in one go
        if num_whole:
            self.left_s -= num_whole * whole_s
            self._count(num_whole * self.interval_s)
            self.outcome.saves_s += num_whole * self.costs.save_s
            self.unsaved_s = 0.0
        spent_s, has_failed = self.spend(self.interval_s)
        self._count(spent_s)
        return not has_failed and self.save()

    def _count(self, spent_s: float) -> None:
        width = max(0.0, 1 - self.num_lost * self.costs.width)
        self.outcome.absent_s += spent_s * (1 - width)
        self.outcome.useful_s += spent_s * width
        self.unsaved_s += spent_s * width

    def save(self) -> bool:
        spent_s, has_failed = self.spend(self.costs.save_s)
        self.outcome.saves_s += spent_s
        if not has_failed:
            self.unsaved_s = 0.0
        return not has_failed

    def recover(self) -> None:
        """Goes on, returns or restarts after a failure, and again if there is another one meanwhile."""
        while True:
            is_fatal = self.draw.random() < self.costs.fatal
            is_restart = is_fatal or self.policy == "restart"
            if is_restart or self.policy == "return":
                self.outcome.useful_s -= self.unsaved_s
                self.outcome.again_s += self.unsaved_s
                self.unsaved_s = 0.0
            self.num_lost = 0 if is_restart else self.num_lost + 1
            if not self._pause(self.costs.notice_s + self._own_s(is_restart)):
                break
        if self.renew is not None and self.num_lost >= self.renew:
            self._renew()

    def _own_s(self, is_restart: bool) -> float:
        costs = self.costs
        return costs.restart_s if is_restart else costs.return_s if self.policy == "return" else costs.regroup_s

    def _pause(self, duration_s: float) -> bool:
        spent_s, has_failed = self.spend(duration_s)
        self.outcome.recoveries_s += spent_s
        return has_failed

    def _renew(self) -> None:
        """A restart that nobody was forced to: it saves first."""
        if not self.save() or self._pause(self.costs.restart_s):
            self.recover()
        else:
            self.num_lost = 0


def simulate(
    costs: Costs,
    policy: str,
    interval_s: float,
    *,
    renew: int | None = None,
    num_failures: int = NUM_FAILURES,
    seed: int = 0,
) -> Outcome:
    """Runs until so many failures have come.

    Args:
        costs: of failures and saves.
        policy: one of `POLICIES`.
        interval_s: between two saves.
        renew: after so many losses all ranks are restarted; None: only when a failure ends the run.
        num_failures: how long the run is.
        seed: of the moments of failures.
    """
    run = _Run(costs, policy, interval_s, renew, seed)
    while run.outcome.num_failures < num_failures:
        if not run.train():
            run.recover()
    return run.outcome


def closed_form(costs: Costs, interval_s: float) -> float:
    """The goodput with a restart after each failure: J. T. Daly, FGCS 22 (2006), equation 13.

    An interval and its save take M exp(R / M) (exp((T + C) / M) - 1) on the mean, with the failures within.
    """
    mtbf_s, restart_s = costs.mtbf_s, costs.notice_s + costs.restart_s
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + costs.save_s) / mtbf_s))


def young(costs: Costs) -> float:
    """The best interval to a first order: J. W. Young, CACM 17 (1974)."""
    return math.sqrt(2 * costs.save_s * costs.mtbf_s)


def best_interval(costs: Costs, policy: str, *, renew: int | None = None, candidates: Iterable[float] = ()) -> float:
    """The interval of the largest simulated goodput: of the candidates, by default 2 % to 50 times Young's."""
    chosen = list(candidates) or [young(costs) * 50 ** (step / 16) for step in range(-16, 17)]
    return max(chosen, key=lambda interval_s: simulate(costs, policy, interval_s, renew=renew).goodput)


def best_renewal(costs: Costs) -> int:
    """After how many losses a restart pays: k / 2 losses are away on the mean, and a k-th of a restart is paid each."""
    each_s = costs.width * costs.mtbf_s
    return max(1, round(math.sqrt(2 * (costs.save_s + costs.restart_s) / each_s)))


# --- tables


def _by_interval(costs: Costs, title: str) -> Table:
    renew = best_renewal(costs)
    rows = []
    for interval_s in INTERVALS_S:
        row = {"snapshot every": f"{interval_s:.0f} s", "restart, Daly's": f"{closed_form(costs, interval_s):.2%}"}
        row |= {policy: f"{simulate(costs, policy, interval_s).goodput:.2%}" for policy in POLICIES}
        row[f"go on, renewed after {renew} losses"] = f"{simulate(costs, 'go on', interval_s, renew=renew).goodput:.2%}"
        rows.append(row)
    return Table(title=f"{title}: goodput by interval", rows=rows)


def _at_best(costs: Costs, title: str, num_ranks: int) -> Table:
    rows = []
    renewed = best_renewal(costs)
    for policy, renew in (*((policy, None) for policy in POLICIES), ("return", renewed), ("go on", renewed)):
        interval_s = best_interval(costs, policy, renew=renew)
        outcome = simulate(costs, policy, interval_s, renew=renew)
        rows.append(
            {
                "policy": policy if renew is None else f"{policy}, renewed after {renew} losses",
                "best interval": f"{interval_s:.0f} s",
                "goodput": f"{outcome.goodput:.2%}",
                **{
                    name: f"{seconds / outcome.wall_s:.2%}"
                    for name, seconds in (
                        ("saves", outcome.saves_s),
                        ("notice, restart, regroup", outcome.recoveries_s),
                        ("steps made again", outcome.again_s),
                        ("absent ranks", outcome.absent_s),
                    )
                },
                "lost GPU hours a day": f"{(1 - outcome.goodput) * 24 * num_ranks:,.0f}",
            }
        )
    return Table(title=f"{title}: at its best interval (Young's for restarts: {young(costs):.0f} s)", rows=rows)


def _measured() -> Table:
    """Runs the job three times: undisturbed, restarted, and going on."""
    rows, best = [], 0.0
    flags = {"max_steps": NUM_STEPS, "global_batch_size": 8 * NUM_RANKS}
    for name, kills, more in (
        ("nobody is killed", [], {}),
        ("restart", KILLS, {}),
        ("go on", KILLS, {"on_rank_loss": "continue"}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            killed.run(Path(folder), kills, NUM_RANKS, **flags, **more)
            steps = killed.steps_of(Path(folder))
        assert {done.step for done in steps} == {*range(1, NUM_STEPS + 1)}
        seconds = steps[-1].time - steps[0].time
        rate = (NUM_STEPS - 1) / seconds
        best = best or rate
        rows.append(
            {
                "run": name,
                "kills": str(len(kills)),
                "steps": str(len(steps)),
                "seconds": f"{seconds:.1f}",
                "useful steps/s": f"{rate:.2f}",
                "goodput": f"{rate / best:.1%}",
            }
        )
    return Table(title=f"Measured: {NUM_RANKS} ranks on one machine, {len(KILLS)} kills", rows=rows)


def _costs(options: argparse.Namespace) -> Costs:
    return Costs(
        mtbf_s=options.days * 86_400 / options.interruptions * LLAMA_RANKS / options.ranks,
        fatal=options.fatal,
        width=options.ranks_lost / options.ranks,
        save_s=options.save,
        notice_s=options.notice,
        restart_s=options.restart,
        return_s=options.back,
        regroup_s=options.regroup,
    )


def _in_words(costs: Costs) -> str:
    return (
        f"one failure in {costs.mtbf_s / 3600:.2f} h, {costs.fatal:.1%} of them fatal, {costs.width:.3%} of the ranks"
        f" lost by each other; save {costs.save_s:g} s, notice {costs.notice_s:g} s, restart {costs.restart_s:g} s,"
        f" return {costs.return_s:g} s, regroup {costs.regroup_s:g} s"
    )


def main() -> None:
    """The measured and the simulated part, and their report."""
    own = Costs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", choices=["measured", "simulated"], help="one of the two parts")
    add("--ranks", type=int, default=LLAMA_RANKS, help="of the simulated job; its failures grow with them")
    add("--days", type=float, default=LLAMA_S / 86_400, help="in which 16,384 ranks have so many --interruptions")
    add("--interruptions", type=int, default=LLAMA_FAILURES)
    add("--fatal", type=float, default=own.fatal, help="the part of the failures after which nobody can go on")
    add("--ranks-lost", type=int, default=8, help="the ranks that a loss takes along: a host's")
    add("--save", type=float, default=own.save_s, help="seconds for which training waits in a save")
    add("--notice", type=float, default=own.notice_s, help="seconds until a failure is known")
    add("--restart", type=float, default=own.restart_s, help="seconds of a restart, without the steps made again")
    add("--back", type=float, default=own.return_s, help="seconds of a return to a snapshot in the same processes")
    add("--regroup", type=float, default=own.regroup_s, help="seconds until those left have met")
    add("--output", type=Path, default=RESULTS / "goodput-cpu.md")
    options = parser.parse_args()
    tables, costs = [], _costs(options)
    if options.only != "simulated":
        tables.append(_measured())
    if options.only != "measured":
        slow = replace(costs, save_s=30.0, restart_s=600.0, return_s=60.0, regroup_s=30.0)
        for words, each in (("costs as given", costs), ("slower costs, an example that nobody has measured", slow)):
            title = f"Simulated, {options.ranks:,} ranks, {words}"
            tables += [_by_interval(each, f"{title} ({_in_words(each)})"), _at_best(each, title, options.ranks)]
    write_report(
        options.output,
        "Goodput of runs that lose ranks",
        about("python -m benchmarks.goodput"),
        tables,
        plot=False,
    )


if __name__ == "__main__":
    main()
