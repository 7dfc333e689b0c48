"""torch's flight recorder: the last collectives of each rank, and the differences between ranks.

torch records each collective that a rank calls (gloo's and NCCL's; the last 2,000, TORCH_FR_BUFFER_SIZE). The failure
report has the last ones of each rank. The rank that writes the report compares them: collectives that some ranks have
called and others have not, and collectives with different types or sizes. torch's `Op.match` decides what may differ.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist

from .._compat.torch import _distributed_c10d
from .rendezvous import in_words

__all__ = ["describe_differences", "late_ranks", "mismatches", "recorded", "traffic"]

_NUM_CALLS = 20
"""The number of last calls of each group that are kept."""
_NUM_GROUPS = 16
_NUM_SENTENCES = 4
_DIFFERENCES = {
    "COLLECTIVE_TYPE_MISMATCH": "operations",
    "SIZE_OR_SYNTAX_MISMATCH": "sizes",
    "COLLECTIVE_DTYPE_MISMATCH": "types",
}
"""The difference, by the name of torch's `MatchState`; its other states are no errors."""


_FORMS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
"""The entries of torch's recorder that must fit between ranks."""

_ITEM_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "UInt64": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "UInt32": 4,
    "Half": 2, "BFloat16": 2, "Short": 2, "UInt16": 2,
}  # fmt: skip
"""Bytes of a value by torch's name for its type; other types have 1."""


@dataclass
class _Traffic:
    """The calls of one operation."""

    number: int = 0
    sent_bytes: float = 0.0
    """The bytes that this rank sends if the collectives use rings; no algorithm sends fewer."""


def traffic(windows_ns: Sequence[tuple[int, int]]) -> tuple[int, dict[str, _Traffic]]:
    """Returns this rank's collectives that were called in some windows of time, by operation.

    Args:
        windows_ns: begin and end of each one, in nanoseconds since 1970.

    Returns:
        The number of windows of which no recorder has forgotten a part, and the calls in these.
    """
    dumps = [entries for entries in _dumps() if entries]
    # A recorder that still has its first call has forgotten none.
    oldest_ns = [
        min(record["time_created_ns"] for record in entries)
        for entries in dumps
        if all(record["record_id"] for record in entries)
    ]
    windows_ns = [window for window in windows_ns if window[0] > max(oldest_ns, default=0)]
    entries = [entry for dump in dumps for entry in dump]
    sizes = {name: len(ranks) for name, ranks in _groups().items()}
    calls: dict[str, _Traffic] = {}
    for entry in entries:
        if any(begin <= entry["time_created_ns"] <= end for begin, end in windows_ns):
            call = calls.setdefault(_operation(entry), _Traffic())
            call.number += 1
            call.sent_bytes += _sent_bytes(entry, sizes.get(entry["process_group"][0], dist.get_world_size()))
    return len(windows_ns), calls


def _operation(entry: Mapping[str, Any]) -> str:
    """``"nccl:_all_gather_base"`` -> ``"all_gather"``, ``"nccl:send 0->1"`` -> ``"send"``."""
    name = entry["profiling_name"].partition(":")[2].partition(" ")[0].strip("_")
    return re.sub(r"(_base|_coalesced|_into_tensor|_tensor)+$", "", name)


def _sent_bytes(entry: Mapping[str, Any], size: int) -> float:
    operation = _operation(entry)
    if operation.startswith(("recv", "barrier")):
        return 0.0
    side = "output" if operation.startswith("all_gather") else "input"
    numels, dtypes = [prod(sizes) for sizes in entry[f"{side}_sizes"]], entry[f"{side}_dtypes"]
    total = sum(numel * _ITEM_BYTES.get(dtype, 1) for numel, dtype in zip(numels, dtypes, strict=False))
    if operation.startswith(("send", "broadcast")):
        return total
    return total * (size - 1) / size * (2 if operation.startswith("all_reduce") else 1)


def recorded() -> dict[str, Any] | None:
    """Returns this rank's last collectives by group, and the ranks of each group; None if nothing is recorded.

    torch also keeps the calls of destroyed groups. A new group of the same name, an earlier run's in this process, say,
    counts from 1 again: the calls of its predecessors are left out.
    """
    calls: dict[str, list[dict[str, Any]]] = {}
    with suppress(Exception):  # an error here must not hide the failure that is reported
        unused = _unused_groups()
        newest: dict[str, int] = {}
        for entry in _entries():
            backend, _, operation = entry["profiling_name"].partition(":")
            group, description = entry["process_group"]
            key = f"{backend} {group}"
            if group in unused or entry["pg_id"] < newest.get(key, 0):
                continue
            # Moved to the end, so that the groups are in the order of their last calls.
            earlier = calls.pop(key, [])
            if entry["pg_id"] > newest.get(key, 0):
                newest[key], earlier = entry["pg_id"], []
            calls[key] = [*earlier[1 - _NUM_CALLS :], _call(entry, operation, description)]
    if not calls:
        return None
    return {"calls": dict(list(calls.items())[-_NUM_GROUPS:]), "groups": _groups()}


def _entries() -> Iterator[dict[str, Any]]:
    for entries in _dumps():
        yield from entries


def _dumps() -> Iterator[list[dict[str, Any]]]:
    # torch: the recorder of all backends but NCCL, and the one of NCCL, which only builds with NCCL have.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])


def _call(entry: Mapping[str, Any], operation: str, description: str) -> dict[str, Any]:
    is_p2p = bool(entry["is_p2p"])
    return {
        "operation": operation,
        "number": entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
        "is_p2p": is_p2p,
        "group": description,
        "is_done": bool(entry["retired"]) or entry["state"] == "completed",
        **{name: entry[name] for name in _FORMS},
    }


def _groups() -> dict[str, list[int]]:
    """Returns the ranks of each group of this process, by the group's name."""
    with suppress(Exception):
        # torch: _world.pg_group_ranks, the ranks of all groups.
        groups = dist.distributed_c10d._world.pg_group_ranks
        return {group.group_name: sorted(ranks) for group, ranks in groups.items()}
    return {}


def _unused_groups() -> set[str]:
    """Returns the names of this process's groups that have not called a collective yet."""
    names: set[str] = set()
    for group in dist.distributed_c10d._world.pg_group_ranks:  # torch: as above
        with suppress(Exception):  # a backend that does not count its calls
            # torch: private, the number of the group's collectives
            if group._get_sequence_number_for_group() == 0:  # type: ignore[attr-defined]
                names.add(group.group_name)
    return names


def describe_differences(by_rank: Mapping[int, dict[str, Any] | None]) -> list[str]:
    """Describes, in sentences, the collectives that differ between ranks, and those that some ranks have not called.

    Args:
        by_rank: the result of `recorded` of each rank; None if it is unknown.
    """
    records = {rank: record for rank, record in by_rank.items() if record}
    sentences = mismatches(records)
    keys = dict.fromkeys(key for record in records.values() for key in record["calls"])
    missing_calls = [sentence for key in keys for sentence in _missing_calls(key, records)]
    return [*sentences, *missing_calls][:_NUM_SENTENCES]


def mismatches(by_rank: Mapping[int, dict[str, Any] | None]) -> list[str]:
    """Describes the first collective of each group that ranks have called with different operations, sizes or types.

    Args:
        by_rank: the result of `recorded` of each rank; None if it is unknown.
    """
    records = {rank: record for rank, record in by_rank.items() if record}
    sentences = []
    for key in dict.fromkeys(key for record in records.values() for key in record["calls"]):
        calls = _by_number(key, records)
        for number in sorted(calls):
            if (sentence := _mismatch(key, number, calls[number], records)) is not None:
                sentences.append(sentence)
                break
    return sentences


def late_ranks(by_rank: Mapping[int, dict[str, Any] | None]) -> list[int]:
    """Returns the ranks that have not called a collective which others of their group have called last.

    Args:
        by_rank: the result of `recorded` of each rank; None if it is unknown.
    """
    records = {rank: record for rank, record in by_rank.items() if record}
    late: set[int] = set()
    for key in dict.fromkeys(key for record in records.values() for key in record["calls"]):
        last = _last_numbers(key, records)
        late.update(rank for rank, number in last.items() if number < max(last.values()))
    return sorted(late)


def _last_numbers(key: str, records: Mapping[int, dict[str, Any]]) -> dict[int, int]:
    """Returns the number of the last collective of a group by rank."""
    calls = _by_number(key, records)
    reported = [rank for rank in _members(key, records) if rank in records]
    return {rank: max((number for number in calls if rank in calls[number]), default=0) for rank in reported}


def _by_number(key: str, records: Mapping[int, dict[str, Any]]) -> dict[int, dict[int, dict[str, Any]]]:
    """Returns the collectives of a group by number and rank."""
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, record in records.items():
        for call in record["calls"].get(key, ()):
            if not call["is_p2p"]:
                calls.setdefault(call["number"], {})[rank] = call
    return calls


def _members(key: str, records: Mapping[int, dict[str, Any]]) -> list[int]:
    name = key.partition(" ")[2]
    for record in records.values():
        if name in record["groups"]:
            return record["groups"][name]
    return sorted(rank for rank, record in records.items() if key in record["calls"])


def _mismatch(
    key: str, number: int, calls: Mapping[int, dict[str, Any]], records: Mapping[int, dict[str, Any]]
) -> str | None:
    first, *others = sorted(calls)
    for other in others:
        differs = _difference(key, calls[first], calls[other], _members(key, records))
        if differs is not None:
            return (
                f"number {number} of group {calls[first]['group']!r} has other {differs} on rank {first}"
                f" ({_shown(calls[first])}) than on rank {other} ({_shown(calls[other])})"
            )
    return None


def _difference(key: str, first: dict[str, Any], second: dict[str, Any], members: list[int]) -> str | None:
    # torch records some all_gathers with the output of one rank, which its comparison takes for an error.
    if all(first[name] == second[name] for name in ("operation", *_FORMS)):
        return None
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
        for call in (first, second)
    ]
    try:
        state = match_one_event(events[0], events[1], {"": set(members)}, "").state.name
    except Exception:  # torch's comparison does not know the operation
        return "operations" if first["operation"] != second["operation"] else None
    return _DIFFERENCES.get(state)


def _missing_calls(key: str, records: Mapping[int, dict[str, Any]]) -> list[str]:
    """Describes which ranks of a group have not called the collective that others wait in."""
    calls, members = _by_number(key, records), _members(key, records)
    last = _last_numbers(key, records)
    if not calls or len(members) < 2:
        return []
    number = min(min(last.values()) + 1, max(last.values()))  # the first that some have not called, or else the last
    present = {rank: call for rank, call in calls.get(number, {}).items() if rank in last}
    absent = [rank for rank in last if last[rank] < number]
    is_pending = not all(call["is_done"] for call in present.values())
    unreported = [rank for rank in members if rank not in records]
    # A rank without a report counts as missing from a pending collective, or, if none is pending, from the last call.
    is_last = all(record["calls"] and next(reversed(record["calls"])) == key for record in records.values())
    if not present or not (absent or (unreported and (is_pending or is_last))):
        return []
    call = present[min(present)]
    text = f"{in_words(sorted(present))} called {_shown(call)}, number {number} of group {call['group']!r}"
    if absent:
        latest = calls.get(last[absent[0]], {}).get(absent[0])
        text += f", which {in_words(absent)} did not"
        if latest is not None:
            text += f"; the last call of rank {absent[0]} there is {_shown(latest)}, number {last[absent[0]]}"
    if unreported:
        text += f"; nothing is known of {in_words(unreported)}"
    return [text]


def _shown(call: Mapping[str, Any]) -> str:
    """``"all_reduce of Float [7]"``."""
    kinds = [f"{dtype} {size}" for dtype, size in zip(call["input_dtypes"], call["input_sizes"], strict=False)]
    return f"{call['operation']} of {', '.join(kinds[:3])}" if kinds else call["operation"]
