"""Parts that rules have in common: the finding, the row of the table, and how a rank is told from all of them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...flags import parse_flag
from ..figures import Figures, Outlier
from ..interval import RankInfo

__all__ = ["COSTLY_COMPRESSION", "RATIO", "Finding", "Rule", "at", "ms", "one_or_all", "option", "who"]

COSTLY_COMPRESSION = 0.05
"""The share of a step by which compressing must be longer than what it saves, to be called a cause."""
RATIO = 1.2
"""How many times as long a rank must compute as the others to be called slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of lost time."""

    cause: str
    """A name of `RULES`, or of a more precise one of its kind."""
    ranks: tuple[int, ...] = ()
    """The ranks at which it lies; empty where it is all of them alike."""
    host: str | None = None
    """The host of the first of them."""
    evidence: str
    numbers: Mapping[str, float]
    remedy: str
    gain: float | None = None
    """The part, 0 to 1, of the time that goes if the cause goes: at most that, since others may hide behind it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    cause: str
    threshold: float
    of: str
    """The quantity that is compared with the threshold."""
    find: Callable[[Figures, float], Finding | None]
    is_last: bool = False
    """Whether it is applied only where no other rule has found anything."""


def one_or_all(figures: Figures, phase: str, threshold: float) -> tuple[Outlier, bool] | None:
    """Whether a phase takes more than `threshold` of one rank's time beyond the others', or of all ranks' time."""
    found = figures.outlier(lambda rank: figures.share(phase, rank))
    if found.value < threshold:
        return None
    is_one = len(figures.totals) > 1 and found.excess >= max(threshold, found.value / 2)
    return (found, is_one) if is_one or found.others >= threshold or len(figures.totals) == 1 else None


def at(figures: Figures, rank: int, is_one: bool) -> dict[str, Any]:
    """Rank and host of a finding, as its keywords; none where all ranks are alike."""
    return {"ranks": (rank,), "host": figures.ranks[rank].host} if is_one else {}


def option(info: RankInfo, name: str) -> str | None:
    """The text of an option of the strategy's flag; None where it was not given, or the strategy is an object."""
    flag = info.flags.get("strategy")
    return parse_flag(flag).options.get(name) if isinstance(flag, str) else None


def ms(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    return f"{1e3 * seconds:.3g} ms"


def who(figures: Figures, rank: int, is_one: bool) -> str:
    """The subject of the evidence: one rank and its host, or every rank."""
    if len(figures.totals) == 1:
        return "the run"
    return f"rank {rank} ({figures.ranks[rank].host})" if is_one else "every rank"
