"""Runs the suite's items one after the other, each in a process of its own, and writes the report after each."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import slug

from .child import Outcome, elsewhere, last_lines
from .goals import goals
from .suite import Item

__all__ = ["Results", "run"]

PART_S = 420.0
"""The longest a part may take: two of them and a start fit where a device is lent for fifteen minutes."""
LEAST_S = 5.0
"""The least time that must be left to begin one more item."""
_SAID = ("tokens/s", "ms per step", "MFU")
"""Of a figure, as soon as it is known."""
_IN_WORDS = {"devices": "devices: {}", "memory_gb": "{} GB each"}


class Results:
    """What is known of each item, in a JSON file beside the report: a later run adds to it and replaces.

    Args:
        folder: of both files.
        about: of the device: ``name``, and whatever else the report says of it.
        header: of the report.
        items: the whole suite, in its order.
    """

    def __init__(self, folder: Path, about: dict[str, Any], header: str, items: Sequence[Item]) -> None:
        self.path = folder / f"gpu-{slug(about['name'])}.md"
        self._records_path = self.path.with_suffix(".json")
        self._about, self._header, self._items = about, header, items
        folder.mkdir(parents=True, exist_ok=True)
        self.records: dict[str, dict[str, Any]] = {}
        if self._records_path.exists():
            self.records = json.loads(self._records_path.read_text())

    def add(self, item: Item, outcome: Outcome, commit: str) -> None:
        """Keeps an outcome, and writes both files."""
        self.records[item.name] = {
            "status": outcome.status,
            "seconds": round(outcome.seconds, 1),
            "value": outcome.value,
            "reason": outcome.reason,
            "output": last_lines(outcome.output) if outcome.status in ("failed", "timed out") else "",
            "commit": commit,
        }
        _replace(self._records_path, json.dumps(self.records, indent=1) + "\n")
        _replace(self.path, self.text())

    def is_known(self, item: Item, commit: str) -> bool:
        """Whether the item has passed on this device at `commit`."""
        record = self.records.get(item.name, {})
        return record.get("status") == "ok" and record["commit"] == commit and " " not in commit

    @property
    def bad(self) -> list[str]:
        """Names of what has failed or did not end, in the suite's order."""
        known = [item.name for item in self._items if item.name in self.records]
        return [name for name in known if self.records[name]["status"] in ("failed", "timed out")]

    def text(self) -> str:
        """The report."""
        about = [_IN_WORDS.get(key, "{}").format(value) for key, value in self._about.items()]
        lines = ["# GPU suite", "", self._header.strip(), "", ", ".join(about), "", "## Checks", ""]
        rows = [
            {
                "check": item.name,
                "proves": item.proves,
                "result": (found := self.records.get(item.name, {})).get("status", "not run"),
                "s": str(found.get("seconds", "")),
                "seen": str(found.get("value") or found.get("reason") or "its part was not run"),
                "commit": found.get("commit", ""),
            }
            for item in self._items
            if not item.is_figure
        ]
        lines += [*_table(rows), ""]
        figures = [item for item in self._items if item.is_figure]
        found = [(item, self.records.get(item.name)) for item in figures]
        known = [record["value"] for _, record in found if record and record["status"] == "ok"]
        if figures:
            lines += ["## Training ByteGPT", ""]
        if known:
            lines += [*_table(known), "", "## Goals", "", *_table(goals(self.records)), ""]
        for item, record in found:
            if record is not None and record["status"] != "ok":
                lines.append(f"- {item.name}: {record['status']}: {_in_line(record['reason'])}")
        if unknown := [item.name for item, record in found if record is None]:
            lines += ["", f"Not run: {', '.join(unknown)}."]
        for name in self.bad:
            lines += ["", f"## {name}", "", "```", self.records[name]["output"], "```"]
        return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_in_line(str(row.get(c, ""))) for c in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _in_line(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    return short if len(short) <= 400 else f"{short[:397]}..."


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.rename(path)


def run(
    items: Sequence[Item],
    results: Results,
    commit: str,
    limit_s: float = PART_S,
    say: Callable[[str], None] = print,
) -> None:
    """Runs `items` in order, and goes on whatever one of them does; those for which no time is left are not run."""
    began = time.monotonic()
    for item in items:
        left_s = limit_s - (time.monotonic() - began)
        if left_s < min(LEAST_S, item.limit_s):
            outcome = Outcome(status="not run", seconds=0.0, reason=f"the {limit_s:.0f} s of its part were over")
        else:
            outcome = elsewhere(item.place, *item.arguments, limit_s=min(item.limit_s, left_s))
        results.add(item, outcome, commit)
        seen = outcome.reason or outcome.value
        if item.is_figure and outcome.status == "ok":
            seen = ", ".join(f"{value} {name}" for name, value in outcome.value.items() if name in _SAID)
        say(f"{outcome.status:9} {outcome.seconds:5.1f} s  {item.name}: {_in_line(str(seen))}")
