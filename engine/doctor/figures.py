"""The figures that the rules look at: a rank's seconds by phase and step, and how it compares with the other ranks."""

import dataclasses
from collections.abc import Callable
from functools import reduce
from statistics import median

from ..phases import PHASES
from .records import Interval, RankInfo, Run

__all__ = ["Figures", "Outlier", "figures_of"]


@dataclasses.dataclass(frozen=True)
class Outlier:
    """The rank that has most of something, against the others."""

    rank: int
    value: float
    others: float
    """The median of the other ranks."""

    @property
    def excess(self) -> float:
        """The difference of the two."""
        return self.value - self.others


@dataclasses.dataclass(frozen=True)
class Figures:
    """Sums over a run, without its first steps.

    Args:
        ranks: by rank.
        totals: of each rank, as one interval.
    """

    ranks: dict[int, RankInfo]
    totals: dict[int, Interval]

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were measured on every rank."""
        return min((total.num_steps for total in self.totals.values()), default=0)

    @property
    def step_s(self) -> float:
        """Wall time of an optimizer step, with all that was between steps; mean over ranks."""
        return sum(t.wall_s / max(t.num_steps, 1) for t in self.totals.values()) / max(len(self.totals), 1)

    @property
    def info(self) -> RankInfo:
        """The first rank's."""
        return self.ranks[min(self.ranks)]

    def share(self, phase: str, rank: int) -> float:
        """The part, 0 to 1, of a rank's wall time that it spends in a phase."""
        total = self.totals[rank]
        return total.seconds.get(phase, 0.0) / max(total.wall_s, 1e-12)

    def mean_shares(self) -> dict[str, float]:
        """Mean over the ranks, by phase, the largest first."""
        shares = {p: sum(self.share(p, rank) for rank in self.totals) / max(len(self.totals), 1) for p in PHASES}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def step_seconds(self, phase: str, rank: int) -> float:
        """A rank's seconds in a phase, for each optimizer step."""
        total = self.totals[rank]
        return total.seconds.get(phase, 0.0) / max(total.num_steps, 1)

    def outlier(self, value: Callable[[int], float]) -> Outlier:
        """The rank for which `value` is largest."""
        values = {rank: value(rank) for rank in self.totals}
        rank = max(values, key=lambda each: values[each])
        others = [each for other, each in values.items() if other != rank]
        return Outlier(rank, values[rank], median(others) if others else 0.0)


def figures_of(run: Run) -> Figures:
    """Sums up what the ranks of a run have noted; of what was only the warm-up where there is nothing else."""
    totals = {}
    for rank, intervals in run.intervals.items():
        judged = [interval for interval in intervals if not interval.is_warmup] or intervals
        if judged:
            totals[rank] = reduce(Interval.joined, judged)
    return Figures({rank: run.ranks[rank] for rank in totals}, totals)
