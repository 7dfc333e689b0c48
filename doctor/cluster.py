"""`polyphase doctor host` in all processes of a job (under torchrun): checks every host and the network between them.

1. The ranks connect over gloo, within a minute.
2. The first rank of each host checks the host, and the results are gathered.
3. Clocks: after a barrier each rank reads its clock, five times; the smallest difference counts.
4. Links: each pair of at most 16 ranks sends 2 MB three times; an all-reduce of 8 MB.
"""

import datetime
import math
import socket
import statistics
import time
from collections.abc import Mapping, Sequence

from polyphase.engine.environment import launched_as, listen_towards, num_launched

from .host import Check, check_host
from .rules import RULES
from .rules.network import culprits, slow_links

__all__ = ["check_cluster", "judge_clocks", "judge_links", "judge_meeting", "judge_versions_alike"]

_PATIENCE_S = 60.0
_MAX_SKEW_S = 1.0
"""Difference of two clocks, in seconds, above which times of files, logs and certificates are misleading."""
_SLOW_MB_PER_S = 200.0
"""Rate between hosts below which sending a model's gradients takes longer than computing them."""
_NUM_ROUNDS = 5


def judge_meeting(num_ranks: int, num_hosts: int, took_s: float | None, error: str | None = None) -> Check:
    """Judges whether all ranks have connected."""
    if error is None:
        return Check("meeting", "ok", f"{num_ranks} ranks on {num_hosts} hosts, after {took_s:.2g} s")
    remedy = "MASTER_ADDR must be an address of rank 0's host that all others reach, and no firewall between them may"
    remedy += " close its ports; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface to use"
    return Check("meeting", "fail", f"{num_ranks} ranks did not meet: {error}", remedy)


def judge_clocks(offsets_s: Mapping[str, float]) -> Check:
    """Judges the clocks of hosts by their differences from rank 0's."""
    host = max(offsets_s, key=lambda name: abs(offsets_s[name]))
    result = f"differ by at most {abs(offsets_s[host]):.2g} s"
    if abs(offsets_s[host]) < _MAX_SKEW_S:
        return Check("clocks", "ok", result)
    return Check("clocks", "warn", f"{result}: that of {host}", f"let chrony or ntpd set the clock of {host}")


def judge_versions_alike(by_host: Mapping[str, str]) -> Check:
    """Judges whether all hosts have the same versions: texts of `judge_versions`."""
    hosts: dict[str, list[str]] = {}
    for host, versions in by_host.items():
        hosts.setdefault(versions, []).append(host)
    if len(hosts) == 1:
        return Check("same versions", "ok", "on all hosts")
    result = "; ".join(f"{', '.join(names)}: {versions}" for versions, names in hosts.items())
    return Check("same versions", "fail", result, "install the same versions on all hosts, or one image")


def judge_links(rates: Mapping[tuple[int, int], float], hosts: Mapping[int, str], all_reduce_mb_per_s: float) -> Check:
    """Judges the rates between ranks.

    Args:
        rates: in MB/s, by source and target; with several hosts, only rates between hosts count.
        hosts: host of each rank.
        all_reduce_mb_per_s: the rate at which each rank sends in a large all-reduce.
    """
    between = {pair: rate for pair, rate in rates.items() if hosts[pair[0]] != hosts[pair[1]]}
    judged = between or rates
    result = f"{all_reduce_mb_per_s:,.0f} MB/s in an all-reduce"
    if not judged:
        return Check("links", "ok", result)
    worst = min(judged, key=lambda pair: judged[pair])
    names = " to ".join(f"rank {rank} ({hosts[rank]})" for rank in worst)
    result += f"; {statistics.median(judged.values()):,.0f} MB/s between ranks, at least {judged[worst]:,.0f} ({names})"
    threshold = next(rule.threshold for rule in RULES if rule.cause == "slow_link")
    _, slow = slow_links(between, threshold)
    if slow:
        at = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in culprits(slow))
        return Check("links", "warn", result, f"look at the network interface and cable of {at}")
    if between and statistics.median(between.values()) < _SLOW_MB_PER_S:
        remedy = "a compression, or local_sgd, send less over such a network; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        return Check("links", "warn", result, f"{remedy} choose another interface where there is a quicker one")
    return Check("links", "ok", result)


def check_cluster(folder: str) -> list[Check]:
    """Checks all hosts of the job; to be called by all its processes.

    Args:
        folder: folder of logs and checkpoints; a rank of each host writes 64 MB there, and removes them.

    Returns:
        On rank 0 all checks; names of checks of a single host begin with the host. Empty on other ranks.
    """
    import torch.distributed as dist

    from polyphase.engine.distributed.link_rates import MOST_RANKS, all_reduce_rate, receive_rates

    (rank, local_rank, address), num_ranks, host = launched_as(), num_launched(), socket.gethostname()
    listen_towards(address)
    began = time.perf_counter()
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_PATIENCE_S))
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        return [judge_meeting(num_ranks, 0, None, str(error).partition("\n")[0])]
    took_s = time.perf_counter() - began
    try:
        own = check_host(folder) if local_rank == 0 else []
        gathered: list[tuple[str, list[Check]]] = [("", [])] * num_ranks
        dist.all_gather_object(gathered, (host, own))
        offset_s = _offset_s()
        rates = receive_rates() if 1 < num_ranks <= MOST_RANKS else []
        rate = all_reduce_rate() if num_ranks > 1 else math.inf
        measured: list[tuple[float, list[float]]] = [(0.0, [])] * num_ranks
        dist.all_gather_object(measured, (offset_s, rates))
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return []
    hosts = {index: name for index, (name, _) in enumerate(gathered)}
    links = {
        (source, target): rate
        for target, (_, rates) in enumerate(measured)
        for source, rate in enumerate(rates)
        if rate
    }
    return [
        *(check._replace(name=f"{name}: {check.name}") for name, checks in gathered for check in checks),
        judge_meeting(num_ranks, len(set(hosts.values())), took_s),
        judge_versions_alike(_versions(gathered)),
        judge_clocks({hosts[index]: offset for index, (offset, _) in enumerate(measured)}),
        judge_links(links, hosts, rate),
    ]


def _versions(gathered: Sequence[tuple[str, list[Check]]]) -> dict[str, str]:
    return {host: check.found for host, checks in gathered for check in checks if check.name == "versions"}


def _offset_s() -> float:
    """Returns the seconds by which this rank's clock is ahead of rank 0's; the time of a barrier is the error."""
    import torch.distributed as dist

    offsets = []
    for _ in range(_NUM_ROUNDS):
        dist.barrier()
        times: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(times, time.time())
        offsets.append(times[dist.get_rank()] - times[0])
    return min(offsets, key=abs)
