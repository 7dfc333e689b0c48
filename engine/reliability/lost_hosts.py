"""Diagnoses a lost connection to another machine.

A rank can't know whether the other host has lost its power or the network between them drops packets. So the message
about a lost connection names the host at its other end, but no culprit. If that host's kernel can be reached
(`host_liveness`), it shows which processes have ended.
"""

import re
import time
from typing import Any

from ..distributed.host_liveness import ProcessState
from ..distributed.store_calls import StoreLostError, place_of
from .rank_registry import RankRegistry

__all__ = ["DIED", "HOST_LOST", "because", "blame", "connection_lost", "lost_ranks", "store_lost"]

DIED = "its process has ended without an error message"

HOST_LOST = "lost host"
"""The kind of a failure whose culprit is unknown."""

_PEER = re.compile(r"\[([0-9A-Fa-f:.]+)\]:\d+")
"""The address of the other end of a connection, in gloo's errors."""
_SILENCE_S = 3.0
"""The time without a heartbeat after which a rank's process is probed: each rank sends one a second."""
_MAX_SILENT_HOSTS = 3
"""The number of hosts without an answer after which no other one is probed: each probe takes seconds."""
_ENDING_S = 0.5
"""The time that the processes of a host may take to end together."""
_UNKNOWN = "the culprit is unknown: that host, or the network between"


def because(failure: dict[str, Any], rank: int) -> str:
    """Describes a recorded failure as the reason why `rank` stops."""
    message = failure["message"]
    if failure["kind"] == HOST_LOST:
        return message
    if failure["rank"] != rank:
        return f"rank {failure['rank']} failed first: {message}"
    return message if failure["by"] == rank else f"rank {failure['by']} reports its failure: {message}"


def blame(failure: dict[str, Any]) -> str:
    """Describes a recorded failure as the reason why the run ends, for the exception of a rank that has not failed."""
    if failure["kind"] == HOST_LOST:
        return f"because {failure['message']}"
    return f"because of rank {failure['rank']}: {failure['message']}"


def lost_ranks(peers: RankRegistry, silent: dict[int, float], longest_s: float) -> tuple[str, str, list[int]] | None:
    """Finds ranks of other machines that have ended, hang, or can't be reached.

    Args:
        peers: all ranks.
        silent: the seconds since the last heartbeat of each rank in question.
        longest_s: the longest time without a heartbeat for a rank whose process runs.

    Returns:
        The kind of the failure, its message and the ranks; None if there are none.
    """
    states = _states(peers, list(silent))
    if ended := [rank for rank in silent if states[rank] == ProcessState.ENDED]:
        ending = _ended(peers, ended)
        return ending["kind"], ending["message"], ended
    if lost := [rank for rank in silent if states[rank] == ProcessState.UNKNOWN]:
        silent_s = max(silent[rank] for rank in lost)
        hosts = peers.hosts(lost)
        message = f"the connection to {hosts} is lost: nothing has been heard of it for {silent_s:.0f} s; {_UNKNOWN}"
        return HOST_LOST, message, lost
    # A rank that has connected in an earlier run may still be on its way into this one.
    if stuck := [rank for rank in silent if silent[rank] > longest_s and rank in peers.last]:
        return "hang", f"nothing has been heard of it for {silent[stuck[0]]:.0f} s, though its process lives", stuck
    return None


def store_lost(peers: RankRegistry | None, error: RuntimeError) -> str | None:
    """Returns a message about a store that can't be reached any more; None if it was on this machine."""
    if peers is None or not (elsewhere := peers.on_other_hosts()):
        return None
    store = peers.job.store
    address = place_of(store).rpartition(" at ")[2].rpartition(":")[0]
    ranks = peers.on_other_hosts(address) or ([0] if 0 in elsewhere else [])
    if not ranks:
        return None
    reason = str(error).rstrip(".") if isinstance(error, StoreLostError) else f"{place_of(store)} is gone"
    return f"the connection to {peers.hosts(ranks)} is lost: {reason}; {_UNKNOWN}"


def connection_lost(peers: RankRegistry, error: BaseException, reporter: int) -> dict[str, Any] | None:
    """Returns the failure behind the error of a connection; None if the ranks of other machines still run.

    Waits some seconds for heartbeats of the ranks at the other end.
    """
    address = _PEER.search(str(error))
    ranks = peers.on_other_hosts(address[1].removeprefix("::ffff:") if address else None)
    if not ranks:
        return None
    failure = {"rank": ranks[0], "kind": HOST_LOST, "by": reporter}
    without_store = None
    try:
        ranks = peers.without_heartbeat(ranks, _SILENCE_S)
    except RuntimeError as error_of_store:  # no heartbeat can be read any more
        time.sleep(_ENDING_S)
        without_store = store_lost(peers, error_of_store)
        without_store = without_store or f"the connection to {peers.hosts(ranks)} is lost; {_UNKNOWN}"
    states = _states(peers, ranks)
    if ended := [rank for rank in ranks if states[rank] == ProcessState.ENDED]:
        return {**failure, **_ended(peers, ended)}
    if without_store is not None:
        return {**failure, "message": without_store}
    if lost := [rank for rank in ranks if states[rank] == ProcessState.UNKNOWN]:
        return {**failure, "rank": lost[0], "message": f"the connection to {peers.hosts(lost)} is lost; {_UNKNOWN}"}
    return None  # these ranks still run, and report their own failures


def _states(peers: RankRegistry, ranks: list[int]) -> dict[int, ProcessState]:
    """Probes the processes of `ranks`; a host that does not answer is probed once."""
    states: dict[int, ProcessState] = {}
    silent_hosts: set[str] = set()
    for rank in ranks:
        host = peers.processes[rank]["host"]
        skips = host in silent_hosts or len(silent_hosts) >= _MAX_SILENT_HOSTS
        states[rank] = ProcessState.UNKNOWN if skips else peers.probe(rank)
        if states[rank] == ProcessState.UNKNOWN:
            silent_hosts.add(host)
    return states


def _ended(peers: RankRegistry, ranks: list[int]) -> dict[str, Any]:
    if len(ranks) == 1:
        return {"rank": ranks[0], "kind": "death", "message": f"{DIED}, on {peers.hosts(ranks)}"}
    ended = f"the processes of {peers.hosts(ranks)} have ended without an error message"
    return {"rank": ranks[0], "kind": HOST_LOST, "message": f"{ended}; which was the first is unknown"}
