"""Which of the suite's goals its records have reached: as much of the device as compiled peers use, and no more than a
loop by hand takes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["goals"]

_LEAST_MFU = {
    "no": {"124M": 33.0, "350M": 36.0, "1.3B": 42.0},
    "yes": {"124M": 40.0, "350M": 43.0, "1.3B": 48.0},
}
"""Percent, of `single`, by whether it is compiled."""
_LEAST_OF_SINGLE = {("fsdp", "no"): 0.97, ("fsdp", "yes"): 0.97, ("tp", "no"): 0.85, ("tp", "yes"): 0.95}
"""The speed of one rank."""
_LEAST_OF_BY_HAND = 0.99
_LEAST_OF_BF16 = 1.12
"""Of `float8`, from 1.3B on."""
_LEAST_GB_S = {
    ("25 MB", "int8"): 300, ("1024 MB", "int8"): 800, ("25 MB", "powersgd:4"): 150, ("1024 MB", "powersgd:4"): 500
}  # fmt: skip

_VERDICTS = {True: "reached", False: "missed", None: "unknown"}
_Goal = tuple[str, str, str, bool | None]


def goals(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns a row for each goal: ``goal``, ``wanted``, ``seen``, ``verdict`` (reached, missed, unknown).

    What compares two loops is a goal once both were measured.
    """
    rows = [r["value"] for r in records.values() if r["status"] == "ok" and isinstance(r["value"], dict)]
    averages = str((records.get("averages") or {}).get("value"))
    return [
        {"goal": goal, "wanted": wanted, "seen": seen, "verdict": _VERDICTS[is_reached]}
        for goal, wanted, seen, is_reached in (*_of_rows(rows), *_of_averages(averages))
    ]


def _of_rows(rows: list[dict[str, str]]) -> Iterator[_Goal]:
    speeds = {
        (row["size"], row["strategy"], row["compile"], row["tokens per step"], row["loop"]): float(row["tokens/s"])
        for row in rows
    }
    for row in rows:
        if not row["loop"].startswith("Engine"):
            continue
        size, strategy, compiled, tokens = (row[name] for name in ("size", "strategy", "compile", "tokens per step"))
        where = f"{size} {strategy}{', compiled' * (compiled == 'yes')}, {tokens} tokens"
        speed = float(row["tokens/s"])
        if row["loop"].startswith("Engine float8"):
            bf16 = speeds.get((size, strategy, compiled, tokens, "Engine"))
            if bf16 is not None:
                yield _of(f"float8 of {where}, of bf16", speed / bf16, _LEAST_OF_BF16)
            continue
        kind = row["loop"].removeprefix("Engine").strip()
        where = f"{where}, {kind}" if kind else where
        if strategy == "single" and size in _LEAST_MFU[compiled]:
            least = _LEAST_MFU[compiled][size]
            yield f"MFU of {where}", f">= {least:g}%", row["MFU"], float(row["MFU"].rstrip("%")) >= least
        by_hand = speeds.get((size, strategy, compiled, tokens, f"by hand {kind}".strip()))
        if by_hand is not None:
            yield _of(f"{where}, of a loop by hand", speed / by_hand, _LEAST_OF_BY_HAND)
        single = speeds.get((size, "single", compiled, tokens, "Engine"))
        least_of_single = _LEAST_OF_SINGLE.get((strategy, compiled))
        if single is not None and least_of_single is not None and row["devices"] == "1" and not kind:
            yield _of(f"{where}, of single", speed / single, least_of_single)
        waits = row["host waits per step"]
        yield f"host waits of {where}", "0", waits, float(waits) == 0
    known = {key[:3] for key in speeds if key[-1].startswith("Engine")}
    for compiled, least_mfu in _LEAST_MFU.items():
        for size, least in least_mfu.items():
            if (size, "single", compiled) not in known:
                yield f"MFU of {size} single{', compiled' * (compiled == 'yes')}", f">= {least:g}%", "", None


def _of(goal: str, share: float, least: float) -> _Goal:
    return goal, f">= {least:.2f}", f"{share:.3f}", share >= least


def _of_averages(seen: str) -> Iterator[_Goal]:
    for (size, method), least in _LEAST_GB_S.items():
        rate = re.search(rf"\b{re.escape(size)} {re.escape(method)}[^:;]*: ([\d.]+) GB/s", seen)
        seen_here, is_reached = (f"{rate[1]} GB/s", float(rate[1]) >= least) if rate else ("", None)
        yield f"{method} of {size}", f">= {least} GB/s", seen_here, is_reached
