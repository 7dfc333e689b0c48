"""`polyphase doctor --compare A B`: compares two runs, in the terminal or as JSON."""

import json
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..flags import choose
from .compare import Comparison, compare_runs, describe_change, phase_text
from .records import Run

__all__ = ["compare_command", "show_comparison"]


def compare_command(words: Sequence[str], read: Callable[[str], Run]) -> int:
    """Runs the command with the arguments after ``--compare``; returns the exit code."""
    folders = [word for word in words if not word.startswith("-")]
    try:
        for word in words:
            if word.startswith("-"):
                choose("flag of doctor --compare", word, ("--json",))
        if len(folders) != 2:
            raise ValueError(f"doctor --compare takes two runs, but got {' '.join(folders) or 'none'}.")
        comparison = compare_runs(*(read(folder) for folder in folders))
    except (OSError, ValueError) as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 2
    if "--json" in words:
        print(json.dumps(comparison.plain(), indent=2))
    else:
        show_comparison(comparison, Console())
    return 0


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Prints which run is faster and why, the settings that differ, and the figures of both runs."""
    console.print(_headline(comparison), highlight=False, style="bold")
    for change in comparison.reasons():
        console.print(f"  {phase_text(change, comparison)}", highlight=False, markup=False, soft_wrap=True)
    gone, new = _findings(comparison)
    if gone:
        console.print(f"  no longer found: {', '.join(gone)}", highlight=False)
    if new:
        console.print(f"  found now: {', '.join(new)}", highlight=False)
    console.print()
    if comparison.setup:
        console.print("set up differently:", highlight=False)
        for key, values in comparison.setup.items():
            console.print(f"  {key}: {describe_change(values)}", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("set up alike, as far as was noted", highlight=False)
    console.print()
    console.print(_table(comparison))


def _headline(comparison: Comparison) -> str:
    unit = comparison.unit
    if comparison.is_same:
        return f"The second run is as fast as the first one: a {unit} takes {comparison.speedup - 1:+.1%} less time."
    times = comparison.speedup
    word = "fast" if times > 1 else "slow"
    return f"The second run is {max(times, 1 / times):.2f} times as {word} as the first one, by the time of a {unit}."


def _findings(comparison: Comparison) -> tuple[list[str], list[str]]:
    before, after = (
        [finding.cause for finding in verdict.findings] for verdict in (comparison.before, comparison.after)
    )
    return [cause for cause in before if cause not in after], [cause for cause in after if cause not in before]


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "first", "second", ""):
        table.add_column(title, justify="right" if title else "left")
    for key, (before, after) in comparison.figures.items():
        change = "" if not before or after is None else f"{after / before - 1:+.0%}"
        table.add_row(key, *("" if value is None else f"{value:,.4g}" for value in (before, after)), change)
    for phase_change in comparison.phases:
        if max(phase_change.before_s, phase_change.after_s) > 0:
            values = f"{1e3 * phase_change.before_s:.3g}", f"{1e3 * phase_change.after_s:.3g}"
            change = f"{phase_change.after_s / phase_change.before_s - 1:+.0%}" if phase_change.before_s else ""
            table.add_row(f"{phase_change.phase}, ms a {comparison.unit}", *values, change)
    return table
