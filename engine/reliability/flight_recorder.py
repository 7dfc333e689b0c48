"""torch's flight recorder: the last collectives of each rank, and which of them the ranks do not agree on.

torch notes each collective that a rank calls (gloo's and NCCL's; the last 2,000, TORCH_FR_BUFFER_SIZE). Each rank puts
its last ones into the failure report, and whoever writes that compares them: which collective some ranks have called
and others have not, and where types or sizes of one collective differ. What may differ is torch's to say (`Op.match`).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from .._compat.torch import _distributed_c10d
from .rank_registry import in_words

__all__ = ["mismatches", "recorded", "told"]

_NUM_CALLS = 20
"""The last calls of each group that are kept."""
_NUM_GROUPS = 16
_NUM_SENTENCES = 4
_DIFFERENCES = {
    "COLLECTIVE_TYPE_MISMATCH": "operations",
    "SIZE_OR_SYNTAX_MISMATCH": "sizes",
    "COLLECTIVE_DTYPE_MISMATCH": "types",
}
"""The difference, by the name of torch's `MatchState`; its other states are no errors."""


def recorded() -> dict[str, Any] | None:
    """The last collectives of this rank, by group, and the ranks of each group; None where nothing is recorded."""
    calls: dict[str, list[dict[str, Any]]] = {}
    with suppress(Exception):  # a run that fails is not to fail once more over its report
        for entry in _entries():
            backend, _, operation = entry["profiling_name"].partition(":")
            group, description = entry["process_group"]
            # Moved to the end, so that the groups are in the order of their last calls.
            there = calls.pop(f"{backend} {group}", [])
            calls[f"{backend} {group}"] = [*there[1 - _NUM_CALLS :], _call(entry, operation, description)]
    if not calls:
        return None
    return {"calls": dict(list(calls.items())[-_NUM_GROUPS:]), "groups": _groups()}


def _entries() -> Iterator[dict[str, Any]]:
    # torch: the recorder of all backends but NCCL, and that of NCCL, which only builds with it have.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield from json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ())


def _call(entry: Mapping[str, Any], operation: str, description: str) -> dict[str, Any]:
    is_p2p = bool(entry["is_p2p"])
    sizes = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    return {
        "operation": operation,
        "number": entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
        "is_p2p": is_p2p,
        "group": description,
        "is_done": bool(entry["retired"]) or entry["state"] == "completed",
        **{name: entry[name] for name in sizes},
    }


def _groups() -> dict[str, list[int]]:
    """The ranks of each group that this process is in, by its name."""
    with suppress(Exception):
        # torch: _world.pg_group_ranks, the ranks of all groups.
        groups = dist.distributed_c10d._world.pg_group_ranks
        return {group.group_name: sorted(ranks) for group, ranks in groups.items()}
    return {}


def told(by_rank: Mapping[int, dict[str, Any] | None]) -> list[str]:
    """Says, in sentences, which collectives the ranks do not agree on, and which they wait in.

    Args:
        by_rank: what each rank has `recorded`, as far as it is known.
    """
    known = {rank: said for rank, said in by_rank.items() if said}
    sentences = mismatches(known)
    keys = dict.fromkeys(key for said in known.values() for key in said["calls"])
    found = [sentence for key in keys for sentence in _absences(key, known)]
    return [*sentences, *found][:_NUM_SENTENCES]


def mismatches(by_rank: Mapping[int, dict[str, Any] | None]) -> list[str]:
    """Says which collectives the ranks have called with different operations, sizes or types; the first of a group.

    Args:
        by_rank: what each rank has `recorded`, as far as it is known.
    """
    known = {rank: said for rank, said in by_rank.items() if said}
    sentences = []
    for key in dict.fromkeys(key for said in known.values() for key in said["calls"]):
        calls = _by_number(key, known)
        for number in sorted(calls):
            if (sentence := _mismatch(key, number, calls[number], known)) is not None:
                sentences.append(sentence)
                break
    return sentences


def _by_number(key: str, known: Mapping[int, dict[str, Any]]) -> dict[int, dict[int, dict[str, Any]]]:
    """The collectives of a group by number and rank."""
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, said in known.items():
        for call in said["calls"].get(key, ()):
            if not call["is_p2p"]:
                calls.setdefault(call["number"], {})[rank] = call
    return calls


def _members(key: str, known: Mapping[int, dict[str, Any]]) -> list[int]:
    name = key.partition(" ")[2]
    for said in known.values():
        if name in said["groups"]:
            return said["groups"][name]
    return sorted(rank for rank, said in known.items() if key in said["calls"])


def _mismatch(
    key: str, number: int, calls: Mapping[int, dict[str, Any]], known: Mapping[int, dict[str, Any]]
) -> str | None:
    first, *others = sorted(calls)
    for other in others:
        differs = _difference(key, calls[first], calls[other], _members(key, known))
        if differs is not None:
            return (
                f"number {number} of group {calls[first]['group']!r} has other {differs} on rank {first}"
                f" ({_shown(calls[first])}) than on rank {other} ({_shown(calls[other])})"
            )
    return None


def _difference(key: str, ours: dict[str, Any], theirs: dict[str, Any], members: list[int]) -> str | None:
    # torch: the comparison that its tool `torchfrtrace` makes; it does not know all operations.
    from .._compat.torch import match_one_event

    backend = key.partition(" ")[0]
    events = [
        {
            **call,
            "profiling_name": f"{backend}:{call['operation']}",
            "process_group": ("", call["group"]),
            "state": "",
            "collective_seq_id": call["number"],
            "p2p_seq_id": 0,
            "time_created_ns": 0,
        }
        for call in (ours, theirs)
    ]
    try:
        state = match_one_event(events[0], events[1], {"": set(members)}, "").state.name
    except Exception:  # an operation that it does not know
        return "operations" if ours["operation"] != theirs["operation"] else None
    return _DIFFERENCES.get(state)


def _absences(key: str, known: Mapping[int, dict[str, Any]]) -> list[str]:
    """Says which ranks of a group have not called what others wait in."""
    calls, members = _by_number(key, known), _members(key, known)
    heard = [rank for rank in members if rank in known]
    last = {rank: max((n for n in calls if rank in calls[n]), default=0) for rank in heard}
    if not calls or len(members) < 2:
        return []
    number = min(last.values()) + 1 if min(last.values()) < max(last.values()) else max(last.values())
    here = {rank: call for rank, call in calls.get(number, {}).items() if rank in last}
    absent = [rank for rank in heard if last[rank] < number]
    waiting = [rank for rank in here if not here[rank]["is_done"]]
    unheard = [rank for rank in members if rank not in known]
    # What is pending says which collective a rank that is gone was to join; else the last call of all may.
    is_last = all(said["calls"] and next(reversed(said["calls"])) == key for said in known.values())
    if not here or not (absent or (unheard and (waiting or is_last))):
        return []
    call = here[min(here)]
    text = f"{in_words(sorted(here))} called {_shown(call)}, number {number} of group {call['group']!r}"
    if absent:
        before = {rank: calls.get(last[rank], {}).get(rank) for rank in absent}
        was = before[absent[0]]
        ended = (
            ""
            if was is None
            else f"; the last call of rank {absent[0]} there is {_shown(was)}, number {last[absent[0]]}"
        )
        text += f", which {in_words(absent)} did not{ended}"
    if unheard:
        text += f"; nothing is known of {in_words(unheard)}"
    return [text]


def _shown(call: Mapping[str, Any]) -> str:
    """``"all_reduce of Float [7]"``."""
    kinds = [f"{dtype} {size}" for dtype, size in zip(call["input_dtypes"], call["input_sizes"], strict=False)]
    return f"{call['operation']} of {', '.join(kinds[:3])}" if kinds else call["operation"]
