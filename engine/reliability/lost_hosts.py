"""Finds out why a connection to another machine has broken, or gone silent.

Whoever is cut off can't know whether the other host has lost its power or the network between them drops packets. So a
lost connection names the host at its other end, and no culprit. Where the other host's kernel answers
(`host_liveness`), it says which processes are no more.
"""

import re
import time
from typing import Any

from ..distributed.host_liveness import Sign
from ..distributed.store_calls import StoreLostError, place_of
from .rank_registry import RankRegistry

__all__ = ["DIED", "HOST_LOST", "because", "blame", "connection_lost", "gone_silent", "store_lost"]

DIED = "its process has ended without a word"

HOST_LOST = "lost host"
"""Kind of a failure for which no rank is to blame, as far as is known."""

_PEER = re.compile(r"\[([0-9A-Fa-f:.]+)\]:\d+")
"""The other end of a connection, as gloo's errors have it."""
_MUTE_S = 3.0
"""The silence of a rank after which it is asked about: it speaks each second."""
_MOST_SILENT = 3
"""After so many machines that do not answer, no other one is asked: that takes seconds for each."""
_DYING_S = 0.5
"""The time that the processes of a host that end at once may take."""
_UNKNOWN = "the culprit is unknown: that host, or the network between"


def because(failure: dict[str, Any]) -> str:
    """Why a rank stops, of a failure on record."""
    if failure["kind"] == HOST_LOST:
        return failure["message"]
    return f"rank {failure['rank']} failed first: {failure['message']}"


def blame(failure: dict[str, Any]) -> str:
    """The reason why a run ends, for the exception of a rank that did not fail."""
    if failure["kind"] == HOST_LOST:
        return f"because {failure['message']}"
    return f"because of rank {failure['rank']}: {failure['message']}"


def gone_silent(peers: RankRegistry, silent: dict[int, float], longest_s: float) -> tuple[str, str, list[int]] | None:
    """Finds ranks of other machines that are gone: kind of the failure, its message, and the ranks; None if none is.

    Args:
        peers: asked for signs of life.
        silent: for how long the ranks have not been heard of.
        longest_s: how long one may be silent whose process lives.
    """
    signs = _signs(peers, list(silent))
    if ended := [rank for rank in silent if signs[rank] == Sign.ENDED]:
        ending = _ended(peers, ended)
        return ending["kind"], ending["message"], ended
    if lost := [rank for rank in silent if signs[rank] == Sign.UNKNOWN]:
        silent_s = max(silent[rank] for rank in lost)
        hosts = peers.hosts(lost)
        lost_s = f"the connection to {hosts} is lost: nothing has been heard of it for {silent_s:.0f} s; {_UNKNOWN}"
        return HOST_LOST, lost_s, lost
    if stuck := [rank for rank in silent if silent[rank] > longest_s]:
        return "hang", f"nothing has been heard of it for {silent[stuck[0]]:.0f} s, though its process lives", stuck
    return None


def store_lost(peers: RankRegistry | None, error: RuntimeError) -> str | None:
    """The message about a store that can't be reached any more; None if it was on this machine."""
    if peers is None or not (elsewhere := peers.elsewhere()):
        return None
    store = peers.job.store
    address = place_of(store).rpartition(" at ")[2].rpartition(":")[0]
    at = peers.elsewhere(address) or ([0] if 0 in elsewhere else [])
    if not at:
        return None
    how = str(error).rstrip(".") if isinstance(error, StoreLostError) else f"{place_of(store)} is gone"
    return f"the connection to {peers.hosts(at)} is lost: {how}; {_UNKNOWN}"


def connection_lost(peers: RankRegistry, error: BaseException, by: int) -> dict[str, Any] | None:
    """The failure that an error of a connection tells of; None if nobody elsewhere has gone.

    Asks the store, and waits for what the ranks at the other end say, if anything.
    """
    address = _PEER.search(str(error))
    ranks = peers.elsewhere(address[1].removeprefix("::ffff:") if address else None)
    if not ranks:
        return None
    failure = {"rank": ranks[0], "kind": HOST_LOST, "by": by}
    unheard = None
    try:
        ranks = peers.mute(ranks, _MUTE_S)
    except RuntimeError as error_of_store:  # so nobody is heard any more
        time.sleep(_DYING_S)
        unheard = store_lost(peers, error_of_store) or f"the connection to {peers.hosts(ranks)} is lost; {_UNKNOWN}"
    signs = _signs(peers, ranks)
    if ended := [rank for rank in ranks if signs[rank] == Sign.ENDED]:
        return {**failure, **_ended(peers, ended)}
    if unheard is not None:
        return {**failure, "message": unheard}
    if lost := [rank for rank in ranks if signs[rank] == Sign.UNKNOWN]:
        return {**failure, "message": f"the connection to {peers.hosts(lost)} is lost; {_UNKNOWN}"}
    return None  # they will say themselves what has become of them


def _signs(peers: RankRegistry, ranks: list[int]) -> dict[int, Sign]:
    """Asks the kernels of other machines for the states of `ranks`; one that does not answer is asked once."""
    signs: dict[int, Sign] = {}
    silent_hosts: set[str] = set()
    for rank in ranks:
        host = peers.processes[rank]["host"]
        is_in_vain = host in silent_hosts or len(silent_hosts) >= _MOST_SILENT
        signs[rank] = Sign.UNKNOWN if is_in_vain else peers.sign(rank)
        if signs[rank] == Sign.UNKNOWN:
            silent_hosts.add(host)
    return signs


def _ended(peers: RankRegistry, ranks: list[int]) -> dict[str, Any]:
    if len(ranks) == 1:
        return {"rank": ranks[0], "kind": "death", "message": f"{DIED}, on {peers.hosts(ranks)}"}
    ended = f"the processes of {peers.hosts(ranks)} have ended without a word"
    return {"rank": ranks[0], "kind": HOST_LOST, "message": f"{ended}; which was the first is unknown"}
