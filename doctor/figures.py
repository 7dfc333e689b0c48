"""The figures for the rules: a rank's seconds by phase and step, and its comparison with the other ranks."""

import dataclasses
from collections.abc import Callable
from functools import reduce
from statistics import median

from polyphase.engine.phases import PHASES

from .interval import Interval, RankInfo
from .records import Run

__all__ = ["Figures", "Outlier", "figures_of"]


@dataclasses.dataclass(frozen=True)
class Outlier:
    """The rank with the largest value, compared with the other ranks."""

    rank: int
    value: float
    others: float
    """The median of the other ranks."""

    @property
    def excess(self) -> float:
        """The value of the rank minus the median of the others."""
        return self.value - self.others


@dataclasses.dataclass(frozen=True)
class Figures:
    """Sums over a run, without its first steps.

    Args:
        ranks: information about each rank.
        totals: the sum of each rank, as one interval.
        series: the intervals that `totals` sums up.
    """

    ranks: dict[int, RankInfo]
    totals: dict[int, Interval]
    series: dict[int, list[Interval]] = dataclasses.field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that were measured on every rank."""
        return min((total.num_steps for total in self.totals.values()), default=0)

    @property
    def step_s(self) -> float:
        """Wall time of an optimizer step, including the time between steps; mean over ranks."""
        return sum(t.wall_s / max(t.num_steps, 1) for t in self.totals.values()) / max(len(self.totals), 1)

    @property
    def info(self) -> RankInfo:
        """Information about the first rank."""
        return self.ranks[min(self.ranks)]

    def host_cpus(self, host: str) -> float:
        """Returns the number of CPUs that the ranks of a host may use together: each may be bound to its own."""
        neighbours = [info for info in self.ranks.values() if info.host == host]
        # A quota of the container, below what they are bound to, is one for all of them.
        if not neighbours or any(info.cpus is None or info.num_cpus < len(info.cpus) for info in neighbours):
            return max((info.num_cpus for info in neighbours), default=1.0)
        return float(len({cpu for info in neighbours for cpu in info.cpus or ()}))

    def share(self, phase: str, rank: int) -> float:
        """Returns the part, 0 to 1, of a rank's wall time that it spends in a phase."""
        total = self.totals[rank]
        return total.seconds.get(phase, 0.0) / max(total.wall_s, 1e-12)

    def mean_shares(self) -> dict[str, float]:
        """Returns the mean share over the ranks by phase, largest first."""
        shares = {p: sum(self.share(p, rank) for rank in self.totals) / max(len(self.totals), 1) for p in PHASES}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def step_seconds(self, phase: str, rank: int) -> float:
        """Returns a rank's seconds in a phase per optimizer step."""
        total = self.totals[rank]
        return total.seconds.get(phase, 0.0) / max(total.num_steps, 1)

    def training_s(self, rank: int) -> float:
        """Returns a rank's wall time without validation and saves."""
        total = self.totals[rank]
        return max(total.wall_s - sum(total.seconds.get(phase, 0.0) for phase in ("validation", "checkpoint")), 1e-12)

    def samples_per_s(self, rank: int) -> float | None:
        """Returns a rank's samples per second of training; None if unknown."""
        return self._per_s(rank, self.totals[rank].num_samples)

    def tokens_per_s(self, rank: int) -> float | None:
        """Returns a rank's tokens per second, including padding; None if batches have no tokens."""
        return self._per_s(rank, self.totals[rank].num_tokens)

    def flops_per_s(self, rank: int) -> float | None:
        """Returns the model's operations per second, without recomputation; None if unknown."""
        return self._per_s(rank, self.totals[rank].flops)

    def mfu(self, rank: int) -> float | None:
        """Returns the model FLOP/s utilization, 0 to 1, relative to the device's peak; None if unknown."""
        peak, rate = self.ranks[rank].peak_flops_per_s, self.flops_per_s(rank)
        return None if not peak or rate is None else rate / peak

    def rates(self, rank: int) -> dict[str, float]:
        """Returns all known rates by name."""
        values = {
            "samples_per_s": self.samples_per_s(rank),
            "tokens_per_s": self.tokens_per_s(rank),
            "flops_per_s": self.flops_per_s(rank),
            "mfu": self.mfu(rank),
        }
        return {name: value for name, value in values.items() if value is not None}

    def mean_rates(self) -> dict[str, float]:
        """Returns the mean over the ranks of the rates that are known on all ranks."""
        by_rank = [self.rates(rank) for rank in self.totals]
        common = [name for name in by_rank[0] if all(name in rates for rates in by_rank)] if by_rank else []
        return {name: sum(rates[name] for rates in by_rank) / len(by_rank) for name in common}

    def _per_s(self, rank: int, count: float | None) -> float | None:
        return None if count is None else count / self.training_s(rank)

    def outlier(self, value: Callable[[int], float]) -> Outlier:
        """Returns the rank for which `value` is largest."""
        values = {rank: value(rank) for rank in self.totals}
        rank = max(values, key=lambda rank: values[rank])
        others = [values[other] for other in values if other != rank]
        return Outlier(rank, values[rank], median(others) if others else 0.0)


def figures_of(run: Run) -> Figures:
    """Sums up the records of a run's ranks without the warm-up; with it if there is nothing else."""
    totals, series = {}, {}
    for rank, intervals in run.intervals.items():
        judged = [interval for interval in intervals if not interval.is_warmup] or intervals
        if judged:
            totals[rank], series[rank] = reduce(Interval.joined, judged), judged
    return Figures({rank: run.ranks[rank] for rank in totals}, totals, series)
