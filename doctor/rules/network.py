"""Rules about the network: its use, compression that saves no time, a slow link between two hosts."""

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
"""The quantile of links with which others are compared: of three ranks, all four links of a slow rank are slower."""
_MIN_RANKS = 3
"""Number of ranks below which there is no other link to compare with."""
_MIN_LATER_S, _MESSAGE_MB = 0.01, 2.0
"""On a slow link, a message of `_MESSAGE_MB` takes at least `_MIN_LATER_S` longer than on a fast link."""


UNDERUSED = 0.6
"""The share of the rate of a large all-reduce below which exposed collectives underuse the network."""
_SYNCHRONOUS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "cp")
"""Strategies whose waits are for collectives, not for a pipeline's bubble or a server's answer."""


def link_use(figures: Figures) -> dict[str, float]:
    """Returns the use of the network by exposed communication; empty if unknown.

    It is an upper bound: all bytes of partly hidden collectives count.

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
    """Returns the time of a step's gradients with the compression and without; empty if unknown.

    With the compression it is the time of the rank that waits least for others; without, the time of an all-reduce at
    the end of training. It is unknown if gradients are not sent in each step.
    """
    costs = [total.compression for total in figures.totals.values()]
    rates = [total.all_reduce_mb_per_s for total in figures.totals.values()]
    is_each_step = not figures.info.strategy.startswith(("local_sgd", "diloco"))
    if not costs or not is_each_step or None in rates or not all(cost.keys() >= _NEEDED for cost in costs):
        return {}
    sent_mb, plain_mb = (mean(cost[name] for cost in costs) for name in ("sent_mb", "plain_mb"))
    rate = mean(measured for measured in rates if measured is not None)
    takes_s, plain_s = min(cost["compress_s"] + cost["wire_s"] for cost in costs), plain_mb / max(rate, 1e-9)
    share = (takes_s - plain_s) / max(figures.step_s, 1e-12)
    return {"share": share, "takes_s": takes_s, "plain_s": plain_s, "sent_mb": sent_mb, "plain_mb": plain_mb}


def costly_compression(figures: Figures, threshold: float) -> Finding | None:
    """Compressing gradients takes longer than it saves in communication."""
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
    """The link between two ranks on different hosts, or all links of one rank, are much slower than the others."""
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
        gain=share * (1.0 - slow[worst] / usual),  # a ring is as fast as its slowest link
    )


def _rates(figures: Figures) -> dict[tuple[int, int], float]:
    """Returns the rates between hosts by source and target; empty if not all ranks have measured.

    Within a host the rate depends on the load of memory and CPUs.
    """
    links_of_ranks = {rank: total.links for rank, total in figures.totals.items() if total.links}
    if len(links_of_ranks) < figures.info.world_size:
        return {}
    hosts = {rank: figures.ranks[rank].host for rank in links_of_ranks}
    return {
        (source, target): links[source]
        for target, links in links_of_ranks.items()
        for source in links_of_ranks
        if hosts[source] != hosts[target]
    }


def slow_links(rates: Mapping[tuple[int, int], float], threshold: float) -> tuple[float, dict[tuple[int, int], float]]:
    """Returns the rate of fast links, and the links with at most `threshold` of it; empty for two ranks.

    Args:
        rates: in MB/s, by source and target.
        threshold: share of the rate of fast links, 0 to 1.
    """
    if len({rank for pair in rates for rank in pair}) < _MIN_RANKS:
        return 0.0, {}
    usual = sorted(rates.values())[math.ceil(_QUICK_QUANTILE * (len(rates) - 1))]
    return usual, {pair: rate for pair, rate in rates.items() if _is_slow(rate, usual, threshold)}


def _is_slow(rate: float, quick: float, threshold: float) -> bool:
    return rate <= threshold * quick and _MESSAGE_MB / max(rate, 1e-9) - _MESSAGE_MB / quick >= _MIN_LATER_S


def culprits(slow: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """Returns the rank that all slow links share; both ranks if there is one pair; otherwise all ranks."""
    counts = Counter(rank for pair in slow for rank in pair)
    pairs = {frozenset(pair) for pair in slow}
    common = [rank for rank in counts if counts[rank] == len(slow)]
    return tuple(common) if len(pairs) > 1 and len(common) == 1 else tuple(sorted(counts))
