"""Rules about the host of a step: operators, threads, CPUs, memory; searches of the graph."""

from statistics import median

from polyphase.engine.phases import PHASES

from ..figures import Figures
from ..interval import RankInfo
from .finding import Finding, at, ms, one_or_all, option, who

__all__ = [
    "cpu_shortage",
    "full_shared_memory",
    "host_bound",
    "low_compute",
    "memory_leak",
    "padding",
    "slow_copy",
    "slow_loader",
    "swapping",
    "thread_oversubscription",
    "uneven_data",
    "unused_parameter_search",
]

_OWN = 0.75
"""Share of a host's CPUs above which the ranks' own threads use them."""
_MIN_INTERVALS = 5
"""Number of intervals below which growth of memory is no finding."""


def host_bound(figures: Figures, threshold: float) -> Finding | None:
    """The host's calls of operators take as long as the step, since each operator has little to compute."""
    shares = {rank: share for rank in figures.totals if (share := _calling_share(figures, rank)) is not None}
    if len(shares) < len(figures.totals) or min(shares.values()) < threshold:
        return None
    rank = min(shares, key=lambda candidate: shares[candidate])
    total, operator_s = figures.totals[rank], figures.ranks[rank].operator_s or 0.0
    per_step = (total.num_operators or 0) / max(total.num_steps, 1)
    each_s = figures.step_seconds("compute", rank) / max(per_step, 1e-12)
    return Finding(
        cause="host_bound",
        evidence=f"{per_step:,.0f} operators a step take {1e6 * each_s:.3g} us each, of which {1e6 * operator_s:.3g} us"
        f" are the host's to call one: {shares[rank]:.0%} of the time",
        numbers={"operators": per_step, "operator_us": 1e6 * operator_s, "share": shares[rank]},
        remedy="compile=True, which makes few operators of many; a larger batch, which has as many; or fewer and larger"
        " operators in the module",
        gain=shares[rank],
    )


def _calling_share(figures: Figures, rank: int) -> float | None:
    """Returns a lower bound of the share of a rank's CPU time that calls of operators take; None if unknown."""
    total, operator_s = figures.totals[rank], figures.ranks[rank].operator_s
    if total.num_operators is None or operator_s is None:
        return None
    calls_s = total.num_operators * operator_s
    # The count is useless if compiled code runs other operators.
    compute_s = total.seconds.get("compute", 0.0)
    with_cpu_s = total.wall_s - (total.runqueue_s or 0.0)
    return calls_s / max(with_cpu_s, 1e-12) if calls_s <= compute_s else None


def thread_oversubscription(figures: Figures, threshold: float) -> Finding | None:
    """The ranks of a host have more threads than it has CPUs, and wait for CPUs."""
    info = figures.info
    num_threads = info.num_threads * info.local_ranks
    queued = _queued_shares(figures)
    share = sum(queued) / len(queued)
    num_cpus = figures.host_cpus(info.host)
    if not _has_too_many_threads(info, num_cpus) or share < threshold:
        return None
    fitting = max(1, int(num_cpus / max(info.local_ranks, 1)))
    return Finding(
        cause="thread_oversubscription",
        host=info.host,
        evidence=f"{info.local_ranks} ranks of {info.num_threads} threads share {num_cpus:g} CPUs, and have none"
        f" for {share:.0%} of the time",
        numbers={"threads": num_threads, "cpus": num_cpus, "share": share},
        remedy=f"OMP_NUM_THREADS={fitting}",
        gain=share,
    )


def cpu_shortage(figures: Figures, threshold: float) -> Finding | None:
    """Every rank, with one thread, waits for a CPU: there are more ranks than CPUs, or other processes compute."""
    info = figures.info
    share, num_cpus = min(_queued_shares(figures)), figures.host_cpus(info.host)
    if info.device != "cpu" or _has_too_many_threads(info, num_cpus) or share < threshold:
        return None
    cause = "busy_neighbour"
    evidence = f"every rank is ready to compute, and other processes have its CPU, for {share:.0%} of the time or more"
    remedy = f"end what else computes on {info.host}, or give each rank CPUs of its own (taskset)"
    busy_cpus = sum((total.cpu_s or 0.0) / max(total.wall_s, 1e-12) for total in figures.totals.values())
    # Time of the ranks' other threads, such as those of collectives, is not a neighbour's.
    own_cpus = sum((total.process_cpu_s or 0.0) / max(total.wall_s, 1e-12) for total in figures.totals.values())
    num_hosts = len({other.host for other in figures.ranks.values()})
    if info.local_ranks <= num_cpus and own_cpus / num_hosts >= _OWN * num_cpus:
        return None
    # If ranks compute for less than that, other processes have their CPUs.
    if info.local_ranks > num_cpus and busy_cpus > num_cpus / 2:
        cause = "cpu_shortage"
        evidence = f"{info.local_ranks} ranks share {num_cpus:g} CPUs, and have none for {share:.0%} of the time"
        remedy = f"devices={max(1, int(num_cpus))}: no more ranks on a host than it has CPUs"
    numbers = {"ranks": info.local_ranks, "cpus": num_cpus, "busy_cpus": busy_cpus, "share": share}
    return Finding(cause=cause, host=info.host, evidence=evidence, numbers=numbers, remedy=remedy, gain=share)


def _queued_shares(figures: Figures) -> list[float]:
    """Returns each rank's share of the time in which its thread was ready, and had no CPU, in forward and backward."""
    return [(total.runqueue_s or 0.0) / max(total.wall_s, 1e-12) for total in figures.totals.values()]


def _has_too_many_threads(info: RankInfo, num_cpus: float) -> bool:
    return info.device == "cpu" and info.num_threads > 1 and info.num_threads * info.local_ranks > num_cpus


def memory_leak(figures: Figures, threshold: float) -> Finding | None:
    """The memory of a process grows without limit."""
    noted = {
        rank: [(interval.step, interval.rss_mb) for interval in intervals if interval.rss_mb is not None]
        for rank, intervals in figures.series.items()
    }
    if min(map(len, noted.values())) < _MIN_INTERVALS:
        return None
    grown: dict[int, float] = {}
    for rank, series in noted.items():
        sizes = [mb for _, mb in series]
        middle = sizes[len(sizes) // 2]
        goes_on = sizes[-1] - middle >= (middle - sizes[0]) / 2  # memory that is allocated once does not grow further
        grown[rank] = (sizes[-1] - sizes[0]) / max(sizes[0], 1.0) if goes_on else 0.0
    rank = max(grown, key=lambda candidate: grown[candidate])
    if grown[rank] < threshold:
        return None
    (first_step, first_mb), *_, (last_step, last_mb) = noted[rank]
    per_step = (last_mb - first_mb) / max(last_step - first_step, 1)
    others = median([growth for other, growth in grown.items() if other != rank] or [grown[rank]])
    where = at(figures, rank, len(grown) > 1 and others < grown[rank] / 2)
    who = f"rank {rank}" if where else "each rank"
    return Finding(
        cause="memory_leak",
        evidence=f"the memory of {who} grows by {per_step:.3g} MB a step: from {first_mb:.0f} to {last_mb:.0f} MB",
        numbers={"mb_per_step": per_step, "from_mb": first_mb, "to_mb": last_mb},
        remedy="keep nothing of each step: `loss.detach()` in lists and sums, no batches on `self`; and look at caches",
        **where,
    )


def full_shared_memory(figures: Figures, threshold: float) -> Finding | None:
    """A host's `/dev/shm`, through which loader workers pass batches, is nearly full."""
    capacities = {rank: figures.ranks[rank].shm_capacity_mb for rank in figures.totals}
    used = {rank: (figures.totals[rank].shm_mb or 0.0) / capacity for rank, capacity in capacities.items() if capacity}
    rank = max(used, key=lambda candidate: used[candidate], default=0)
    if not used or used[rank] < threshold:
        return None
    host = figures.ranks[rank].host
    neighbours = tuple(candidate for candidate in figures.totals if figures.ranks[candidate].host == host)
    return Finding(
        cause="full_shared_memory",
        ranks=() if len(neighbours) == len(figures.totals) else neighbours,
        host=host,
        evidence=f"/dev/shm of {host} was {used[rank]:.0%} full: {figures.totals[rank].shm_mb:,.0f} of"
        f" {capacities[rank]:,.0f} MB; a loader's worker that finds no room ends in a bus error",
        numbers={"share": used[rank], "mb": figures.totals[rank].shm_mb or 0.0},
        remedy="docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm; fewer loader workers, or a"
        " smaller prefetch_factor",
    )


def swapping(figures: Figures, threshold: float) -> Finding | None:
    """A host reads memory back from swap while it trains."""
    rates = {rank: (total.swap_read_mb or 0.0) / max(total.wall_s, 1e-12) for rank, total in figures.totals.items()}
    worst = max(rates, key=lambda rank: rates[rank])
    if rates[worst] < threshold:
        return None
    host = figures.ranks[worst].host
    neighbours = tuple(rank for rank in rates if figures.ranks[rank].host == host)
    swapped_mb = {rank: figures.totals[rank].swapped_mb or 0.0 for rank in neighbours}
    most = max(swapped_mb, key=lambda rank: swapped_mb[rank])
    others = "its ranks have nothing there, so it is another process's"
    whose = others if not swapped_mb[most] else f"rank {most} has {swapped_mb[most]:,.0f} MB there"
    return Finding(
        cause="swapping",
        ranks=() if len(neighbours) == len(rates) else neighbours,
        host=host,
        evidence=f"{host} reads {rates[worst]:.3g} MB/s back from swap while it trains; {whose}",
        numbers={"mb_per_s": rates[worst], "swapped_mb": swapped_mb[most]},
        remedy="less memory on that host: fewer or leaner loader workers, no data set kept by each rank, fewer ranks;"
        " or end what else has it",
    )


def unused_parameter_search(figures: Figures, threshold: float) -> Finding | None:
    """Each step searches the graph for parameters without gradient, and there are none."""
    info = figures.info
    is_on = option(info, "find_unused_parameters") == "true" or "find_unused_parameters_true" in str(
        info.flags.get("strategy")
    )
    looks = [
        [interval.without_gradient for interval in intervals if interval.without_gradient is not None]
        for intervals in figures.series.values()
    ]
    if not is_on or len(figures.totals) < 2 or min(map(len, looks)) < threshold or any(map(any, looks)):
        return None
    return Finding(
        cause="unused_parameter_search",
        evidence=f"each step searches for parameters without gradient; in {min(map(len, looks))} looks there were none",
        numbers={"looks": min(map(len, looks))},
        remedy="leave out find_unused_parameters, unless some batches use fewer parameters than those looked at",
    )


# --- the last rule: little of the time is computing, and no single cause stands out


_USEFUL = ("compute", "optimizer")
_APART = ("validation", "checkpoint")
"""Phases outside of a step."""
_SHOWN, _NUM_SHOWN = 0.02, 3
_REMEDIES = {
    "data_wait": "more loader workers: num_workers, persistent_workers, prefetch_factor",
    "copy": "pin_memory=True, and a lighter `on_after_batch_transfer`",
    "communication": "a larger batch, or accumulate_grad_batches, which sends half as often",
    "waiting": "steps that are alike on all ranks: batches of one length, CPUs of their own",
    "bubble": "more micro-batches: pp:microbatches=...",
    "callbacks": "fewer or lighter hooks: `polyphase doctor RUN_DIR --json` has the slowest",
    "logging": "a larger log_every_n_steps",
    "engine": "a larger batch: the loop takes as long for each step, whatever it computes",
}


def low_compute(figures: Figures, threshold: float) -> Finding | None:
    """Forward, backward and optimizer take a small part of the time."""
    useful = list(_USEFUL)
    if figures.info.device == "cpu":
        # On CPUs collectives compute as well; they have a rule of their own, as bubbles have.
        useful += ["communication", "bubble"] if figures.info.layout.get("pp", 1) > 1 else ["communication"]
    ranks = figures.totals
    share = sum(sum(_share(figures, phase, rank) for phase in useful) for rank in ranks) / len(ranks)
    if share >= threshold:
        return None
    others = {
        phase: sum(_share(figures, phase, rank) for rank in ranks) / len(ranks)
        for phase in PHASES
        if phase not in useful and phase not in _APART
    }
    largest = sorted(others, key=lambda phase: -others[phase])[:_NUM_SHOWN]
    shown = [f"{phase.replace('_', ' ')} {others[phase]:.0%}" for phase in largest if others[phase] >= _SHOWN]
    return Finding(
        cause="low_compute",
        evidence=f"{', '.join(useful[:-1])} and {useful[-1]} take {share:.0%} of a step's time; {', '.join(shown)}",
        numbers={"share": share, **others},
        remedy=_REMEDIES[largest[0]],
        gain=1.0 - share / threshold,
    )


def _share(figures: Figures, phase: str, rank: int) -> float:
    return figures.totals[rank].seconds.get(phase, 0.0) / figures.training_s(rank)


# --- rules about data: loaders, copies to the device, padding, uneven shares


def slow_loader(figures: Figures, threshold: float) -> Finding | None:
    """The data loader of one rank, or of all, is late."""
    outlier_or_all = one_or_all(figures, "data_wait", threshold)
    if outlier_or_all is None:
        return None
    outlier, is_one = outlier_or_all
    seconds = figures.step_seconds("data_wait", outlier.rank)
    evidence = f"{who(figures, outlier.rank, is_one)} waits {ms(seconds)} of each step for its data loader"
    if is_one:
        evidence += f", the others {ms(outlier.others * figures.step_s)}"
    info = figures.ranks[outlier.rank]
    spare = max(1, min(8, int(info.num_cpus / max(info.local_ranks, 1)) - 1))
    if info.num_workers is None:
        remedy = "have the data made ahead by worker processes: a torch DataLoader with num_workers"
    elif info.num_workers == 0:
        remedy = f"DataLoader(num_workers={spare}, persistent_workers=True)"
    else:
        remedy = f"DataLoader(num_workers={2 * info.num_workers}, prefetch_factor=4), or a faster transform"
    if is_one:
        remedy += f"; if the others' data are as slow to read, look at the disk and network of {info.host}"
    gain = outlier.excess if is_one else outlier.others or outlier.value
    numbers = {"share": outlier.value, "others": outlier.others, "step_ms": 1e3 * seconds}
    return Finding(
        cause="slow_loader", evidence=evidence, numbers=numbers, remedy=remedy, gain=gain,
        **at(figures, outlier.rank, is_one),
    )  # fmt: skip


def slow_copy(figures: Figures, threshold: float) -> Finding | None:
    """Batches go to the device slowly."""
    outlier_or_all = one_or_all(figures, "copy", threshold)
    if outlier_or_all is None:
        return None
    outlier, is_one = outlier_or_all
    info = figures.ranks[outlier.rank]
    remedy = "a lighter `on_after_batch_transfer`; move what it does into the data loader's workers"
    if info.device != "cpu" and not info.pins_memory:
        remedy = "DataLoader(pin_memory=True)"
    name = who(figures, outlier.rank, is_one)
    evidence = f"{name} spends {outlier.value:.0%} of the time on copying batches to the device"
    numbers = {"share": outlier.value, "others": outlier.others}
    where = at(figures, outlier.rank, is_one)
    return Finding(cause="slow_copy", evidence=evidence, numbers=numbers, remedy=remedy, gain=outlier.value, **where)


def padding(figures: Figures, threshold: float) -> Finding | None:
    """Batches are padded much."""
    shares = [total.padding for total in figures.totals.values() if total.padding is not None]
    share = sum(shares) / len(shares) if shares else 0.0
    if share < threshold:
        return None
    return Finding(
        cause="padding",
        evidence=f"{share:.0%} of the tokens are padding",
        numbers={"share": share},
        remedy="LengthBucketing, or packed sequences: see docs/howto/sequences-of-many-lengths.md",
        gain=share * sum(figures.share("compute", rank) for rank in figures.totals) / len(figures.totals),
    )


def uneven_data(figures: Figures, threshold: float) -> Finding | None:
    """Ranks run out of data before others."""
    outlier = figures.outlier(lambda r: figures.totals[r].num_fillers / max(figures.totals[r].num_batches, 1))
    if outlier.value < threshold:
        return None
    return Finding(
        cause="uneven_data",
        evidence=f"{outlier.value:.0%} of the batches of rank {outlier.rank} only keep it in step with the others",
        numbers={"share": outlier.value},
        remedy="split the data evenly over the ranks; or uneven='drop', which ends the epoch with the shortest",
        gain=outlier.value,
        **at(figures, outlier.rank, True),
    )
