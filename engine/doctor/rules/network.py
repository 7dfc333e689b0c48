"""Rules about what carries the gradients: its use, compression that does not pay, a slow link between two hosts."""

import math
from collections import Counter
from collections.abc import Mapping
from statistics import mean

from ..figures import Figures
from .finding import Finding, ms

__all__ = [
    "UNDERUSED",
    "compression_cost",
    "costly_compression",
    "culprits",
    "link_use",
    "slow_link",
    "slow_links",
]

_NEEDED = {"compress_s", "wire_s", "sent_mb", "plain_mb"}
_QUICK_QUANTILE = 0.75
"""The link to which others are compared: of three ranks, all four links of one slow rank are slower than that."""
_MIN_RANKS = 3
"""Ranks below which there is no other link to compare with."""
_MIN_LATER_S, _MESSAGE_MB = 0.01, 2.0
"""A message of this size must be later than through that link by so much."""


UNDERUSED = 0.6
"""The part of the rate of a large all-reduce below which collectives that are exposed don't use what carries them."""
_SYNCHRONOUS = ("ddp", "zero1", "fsdp", "hsdp", "tp")
"""Strategies that wait for their collectives when they communicate: not a pipeline's bubble, nor a server's answer."""


def link_use(figures: Figures) -> dict[str, float]:
    """Returns how much of what carries it exposed communication uses; empty if unknown.

    That is at most what it uses: of collectives that are hidden in part, all bytes count.

    Returns:
        ``used_mb_per_s`` and ``mb_per_s``, that of a large all-reduce, of each rank; ``use``, their ratio; ``call_mb``,
        the mean size of a call.
    """
    totals = list(figures.totals.values())
    rates = [total.all_reduce_mb_per_s for total in totals if total.all_reduce_mb_per_s]
    is_known = len(rates) == len(totals) and all(total.collectives for total in totals)
    if not is_known or not figures.info.strategy.startswith(_SYNCHRONOUS):
        return {}
    rate = mean(rates)
    sent_mb = mean(sum(call["sent_mb"] for call in total.collectives.values()) for total in totals)
    calls = mean(sum(call["calls"] for call in total.collectives.values()) for total in totals)
    used = sent_mb / max(mean(figures.step_seconds("communication", rank) for rank in figures.totals), 1e-9)
    return {"used_mb_per_s": used, "mb_per_s": rate, "use": used / rate, "call_mb": sent_mb / max(calls, 1e-12)}


def compression_cost(figures: Figures) -> dict[str, float]:
    """Returns how much longer gradients take with the compression than without, in a step; empty if unknown.

    With it, they take what the rank takes that waits least for others; without, what an all-reduce took in the end.
    None is known where gradients are not sent in each step.
    """
    known = [total.compression for total in figures.totals.values()]
    rates = [total.all_reduce_mb_per_s for total in figures.totals.values()]
    is_each_step = not figures.info.strategy.startswith(("local_sgd", "diloco"))
    if not known or not is_each_step or None in rates or not all(each.keys() >= _NEEDED for each in known):
        return {}
    sent_mb, plain_mb = (mean(each[name] for each in known) for name in ("sent_mb", "plain_mb"))
    rate = mean(each for each in rates if each is not None)
    takes_s, plain_s = min(each["compress_s"] + each["wire_s"] for each in known), plain_mb / max(rate, 1e-9)
    share = (takes_s - plain_s) / max(figures.step_s, 1e-12)
    return {"share": share, "takes_s": takes_s, "plain_s": plain_s, "sent_mb": sent_mb, "plain_mb": plain_mb}


def costly_compression(figures: Figures, threshold: float) -> Finding | None:
    """Compressing gradients takes longer than what it saves on the wire."""
    cost = compression_cost(figures)
    if not cost or cost["share"] < threshold:
        return None
    compression = figures.info.compression
    return Finding(
        cause="costly_compression",
        evidence=f"with compression={compression!r} averaging gradients takes {ms(cost['takes_s'])} a step for"
        f" {cost['sent_mb']:.3g} MB, and {cost['plain_mb']:.3g} MB without it would take {ms(cost['plain_s'])}",
        numbers=cost,
        remedy="compression='none'; or 'auto', which measures both before it chooses",
        gain=min(cost["share"], 1.0),
    )


def slow_link(figures: Figures, threshold: float) -> Finding | None:
    """The link between two ranks on different hosts, or all those of one rank, is much slower than the others."""
    rates = _rates(figures)
    usual, slow = slow_links(rates, threshold)
    if not slow:
        return None
    ranks = culprits(slow)
    worst = min(slow, key=lambda pair: slow[pair])
    hosts = [figures.ranks[rank].host for rank in ranks]
    if len(ranks) == 1:
        subject, remedy = f"rank {ranks[0]} ({hosts[0]})", f"look at the network interface and cable of {hosts[0]}"
    else:
        between = " and ".join(dict.fromkeys(hosts))
        subject = f"the link between {' and '.join(f'rank {rank}' for rank in ranks)} ({between})"
        remedy = f"look at the network between {between}: `polyphase bench-comm` measures it"
    share = mean(figures.share("communication", rank) for rank in figures.totals)
    return Finding(
        cause="slow_link",
        ranks=ranks,
        host=hosts[0],
        evidence=f"{subject} carries {slow[worst]:,.0f} MB/s (rank {worst[0]} to rank {worst[1]}), where others carry"
        f" {usual:,.0f} MB/s",
        numbers={"mb_per_s": slow[worst], "others_mb_per_s": usual, "links": len(slow)},
        remedy=f"{remedy}; or leave that host out",
        gain=share * (1.0 - slow[worst] / usual),  # a ring is as quick as its slowest link
    )


def _rates(figures: Figures) -> dict[tuple[int, int], float]:
    """Returns the rates between hosts by source and target; none where not all ranks have measured.

    Within a host a message is as quick as its memory and its CPUs are free.
    """
    known = {rank: total.links for rank, total in figures.totals.items() if total.links}
    if len(known) < figures.info.world_size:
        return {}
    hosts = {rank: figures.ranks[rank].host for rank in known}
    return {
        (source, target): links[source]
        for target, links in known.items()
        for source in known
        if hosts[source] != hosts[target]
    }


def slow_links(rates: Mapping[tuple[int, int], float], threshold: float) -> tuple[float, dict[tuple[int, int], float]]:
    """Returns the rate of quick links, and those links that carry at most `threshold` of it; none of two ranks.

    Args:
        rates: in MB/s, by source and target.
        threshold: a part of the rate of quick links, 0 to 1.
    """
    if len({rank for pair in rates for rank in pair}) < _MIN_RANKS:
        return 0.0, {}
    usual = sorted(rates.values())[math.ceil(_QUICK_QUANTILE * (len(rates) - 1))]
    return usual, {pair: rate for pair, rate in rates.items() if _is_slow(rate, usual, threshold)}


def _is_slow(rate: float, quick: float, threshold: float) -> bool:
    return rate <= threshold * quick and _MESSAGE_MB / max(rate, 1e-9) - _MESSAGE_MB / quick >= _MIN_LATER_S


def culprits(slow: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """Returns the rank that all slow links have in common; both where there is one pair; else all of them."""
    counts = Counter(rank for pair in slow for rank in pair)
    pairs = {frozenset(pair) for pair in slow}
    common = [rank for rank in counts if counts[rank] == len(slow)]
    return tuple(common) if len(pairs) > 1 and len(common) == 1 else tuple(sorted(counts))
