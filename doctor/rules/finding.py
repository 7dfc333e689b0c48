"""Shared parts of the rules: the finding, the row of the table, and the distinction between one rank and all ranks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyphase.engine.flags import parse_flag

from ..figures import Figures, Outlier
from ..interval import RankInfo

__all__ = ["COSTLY_COMPRESSION", "RATIO", "Finding", "Rule", "at", "ms", "one_or_all", "option", "who"]

COSTLY_COMPRESSION = 0.05
"""The share of a step by which compressing must take longer than it saves, to be a cause."""
RATIO = 1.2
"""The factor by which a slow rank computes longer than the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of lost time."""

    cause: str
    """A name in `RULES`, or a more precise one."""
    ranks: tuple[int, ...] = ()
    """The ranks with the cause; empty if all ranks have it."""
    host: str | None = None
    """The host of the first of these ranks."""
    evidence: str
    numbers: Mapping[str, float]
    remedy: str
    gain: float | None = None
    """The share of the time, 0 to 1, that the cause takes: at most that is gained, since other causes may follow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    cause: str
    threshold: float
    of: str
    """The quantity that is compared with the threshold."""
    find: Callable[[Figures, float], Finding | None]
    is_last: bool = False
    """Whether it is applied only if no other rule has a finding."""


def one_or_all(figures: Figures, phase: str, threshold: float) -> tuple[Outlier, bool] | None:
    """Whether a phase takes more than `threshold` of one rank's time beyond the others', or of all ranks' time."""
    outlier = figures.outlier(lambda rank: figures.share(phase, rank))
    if outlier.value < threshold:
        return None
    is_one = len(figures.totals) > 1 and outlier.excess >= max(threshold, outlier.value / 2)
    return (outlier, is_one) if is_one or outlier.others >= threshold or len(figures.totals) == 1 else None


def at(figures: Figures, rank: int, is_one: bool) -> dict[str, Any]:
    """Returns rank and host of a finding, as keywords; empty if all ranks are alike."""
    return {"ranks": (rank,), "host": figures.ranks[rank].host} if is_one else {}


def option(info: RankInfo, name: str) -> str | None:
    """Returns the text of an option of the strategy's flag; None if it is not set, or the strategy is an object."""
    flag = info.flags.get("strategy")
    return parse_flag(flag).options.get(name) if isinstance(flag, str) else None


def ms(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    return f"{1e3 * seconds:.3g} ms"


def who(figures: Figures, rank: int, is_one: bool) -> str:
    """Returns the subject of the evidence: one rank and its host, or every rank."""
    if len(figures.totals) == 1:
        return "the run"
    return f"rank {rank} ({figures.ranks[rank].host})" if is_one else "every rank"
