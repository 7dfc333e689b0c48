"""Compares two runs: differences in their settings, the gain of the second run, and the phases that changed."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from polyphase.engine.flags import choose
from polyphase.engine.foreign import for_terminal
from polyphase.engine.phases import PHASES

from .figures import Figures
from .interval import RankInfo
from .records import Run
from .verdict import Verdict, judge, name

__all__ = ["Comparison", "compare_command", "compare_runs"]

_SAME = 0.02
"""Relative difference below which two runs count as equally fast."""
_NOT_SETUP = {
    *("schema", "rank", "started_at", "peak_flops_per_s", "flags", "versions", "lr_interval_steps"),
    *("default_root_dir", "resume"),
}
_MOVES: dict[str, tuple[str, ...]] = {
    "data_wait": ("num_workers", "pins_memory", "num_cpus", "host"),
    "copy": ("pins_memory", "device", "device_name"),
    "compute": ("dtype", "precision", "compile", "num_threads", "activation_checkpointing", "offload", "strategy",
                "layout", "device", "device_name", "micro_batch_size", "torch"),
    "communication": ("strategy", "layout", "compression", "accumulate_grad_batches", "world_size", "precision",
                      "num_nodes"),
    "waiting": ("strategy", "layout", "world_size", "num_threads", "host"),
    "bubble": ("strategy", "layout", "world_size", "micro_batch_size"),
    "optimizer": ("strategy", "layout", "accumulate_grad_batches", "gradient_clip_val", "compile", "torch",
                  "unfused_optimizer"),
    "callbacks": ("callbacks", "enable_progress_bar"),
    "logging": ("loggers", "logger", "log_every_n_steps"),
    "validation": ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches"),
    "checkpoint": ("callbacks", "checkpoint_format", "enable_checkpointing"),
    "engine": ("polyphase", "accumulate_grad_batches"),
}  # fmt: skip
"""Settings that may change the time of each phase."""


@dataclasses.dataclass(frozen=True)
class _PhaseChange:
    """The time of a phase per unit of work in both runs, mean over ranks."""

    phase: str
    before_s: float
    after_s: float
    related: dict[str, tuple[Any, Any]]
    """Settings that differ and may be the cause."""

    @property
    def gain_s(self) -> float:
        """Seconds that the second run saves."""
        return self.before_s - self.after_s


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Args:
        before: the verdict on the first run.
        after: the verdict on the second run.
        setup: settings that differ: both values by name.
        unit: unit of work: a ``"step"``, or a ``"sample"`` if the steps of the runs have different numbers of samples.
        phases: phases that differ, the largest difference first.
        figures: both values by name: rates, memory, the time of a step.
    """

    before: Verdict
    after: Verdict
    setup: dict[str, tuple[Any, Any]]
    unit: str
    phases: list[_PhaseChange]
    figures: dict[str, tuple[float | None, float | None]]

    @property
    def speedup(self) -> float:
        """The speed of the second run divided by that of the first, per unit of work."""
        before, after = (sum(getattr(phase, side) for phase in self.phases) for side in ("before_s", "after_s"))
        return before / max(after, 1e-12)

    @property
    def is_same(self) -> bool:
        """Whether the difference is too small to be significant."""
        return abs(self.speedup - 1.0) < _SAME

    def reasons(self) -> list[_PhaseChange]:
        """Returns the phases that account for at least a tenth of the difference, in its direction."""
        if self.is_same:
            return []
        total_s = sum(phase.gain_s for phase in self.phases)
        return [phase for phase in self.phases if phase.gain_s / total_s >= 0.1]

    def plain(self) -> dict[str, Any]:
        """Returns the comparison as JSON values; see docs/doctor.md."""
        causes = [[finding.cause for finding in verdict.findings] for verdict in (self.before, self.after)]
        return {
            "speedup": self.speedup,
            "unit": self.unit,
            "setup": {key: list(values) for key, values in self.setup.items()},
            "figures": {key: list(values) for key, values in self.figures.items()},
            "phases": {change.phase: [change.before_s, change.after_s] for change in self.phases},
            "reasons": [{"phase": change.phase, "related": sorted(change.related)} for change in self.reasons()],
            "findings": causes,
        }


def compare_runs(before: Run, after: Run) -> Comparison:
    """Compares two runs.

    Raises:
        ValueError: one of the runs has no measured step.
    """
    verdicts = judge(before), judge(after)
    for number, verdict in zip(("first", "second"), verdicts, strict=True):
        if not verdict.figures.num_steps:
            raise ValueError(f"the {number} run has no measured step: there is nothing to compare.")
    first, second = (verdict.figures for verdict in verdicts)
    setup = _differences(_setup(first.info), _setup(second.info))
    samples = _samples_per_step(first), _samples_per_step(second)
    is_by_sample = None not in samples and samples[0] != samples[1]
    units = samples if is_by_sample else (1.0, 1.0)
    phases = [
        _PhaseChange(
            phase,
            _phase_s(first, phase) / (units[0] or 1.0),
            _phase_s(second, phase) / (units[1] or 1.0),
            {key: setup[key] for key in _MOVES[phase] if key in setup},
        )
        for phase in PHASES
    ]
    phases.sort(key=lambda change: -abs(change.gain_s))
    sides = _values(first), _values(second)
    figures = {key: (sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys([*sides[0], *sides[1]])}
    return Comparison(*verdicts, setup, "sample" if is_by_sample else "step", phases, figures)


def _describe_change(value: tuple[Any, Any]) -> str:
    """Formats two values: ``(0, 4)`` -> ``"0 -> 4"``."""
    return " -> ".join("none" if side is None else str(side) for side in value)


def phase_text(change: _PhaseChange, comparison: Comparison) -> str:
    """Formats a change: ``"data wait: 50 ms -> 2 ms a step, 96% of the difference; num_workers 0 -> 4"``."""
    total_s = sum(phase.gain_s for phase in comparison.phases)
    text = f"{name(change.phase)}: {1e3 * change.before_s:.3g} ms -> {1e3 * change.after_s:.3g} ms a {comparison.unit}"
    text += f", {change.gain_s / total_s:.0%} of the difference" if total_s else ""
    related = ", ".join(f"{key} {_describe_change(value)}" for key, value in change.related.items())
    return f"{text}; {related}" if related else text


def _setup(info: RankInfo) -> dict[str, Any]:
    """Returns all settings by name; a flag that is left out has its default."""
    values = {**info.flags, **info.versions, **vars(info)}
    return {key: value for key, value in values.items() if key not in _NOT_SETUP}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in names if before.get(key) != after.get(key)}


def _samples_per_step(figures: Figures) -> float | None:
    """Returns the samples of all ranks in an optimizer step; samples shared by several ranks count once."""
    counts = [total.num_samples for total in figures.totals.values()]
    if any(count is None for count in counts):
        return None
    sharing = math.prod(figures.info.layout.get(axis, 1) for axis in ("tp", "cp", "pp"))
    return round(sum(count or 0 for count in counts) / sharing / max(figures.num_steps, 1), 1) or None


def _phase_s(figures: Figures, phase: str) -> float:
    return sum(figures.step_seconds(phase, rank) for rank in figures.totals) / len(figures.totals)


def _values(figures: Figures) -> dict[str, float]:
    """Returns the other numbers to compare: for memory the largest over the ranks, else the mean."""
    values: dict[str, float | None] = {"step_ms": 1e3 * figures.step_s, "samples_per_step": _samples_per_step(figures)}
    values |= figures.mean_rates()
    for key in ("rss_mb", "device_mb"):
        by_rank = [value for total in figures.totals.values() if (value := getattr(total, key)) is not None]
        values[key] = max(by_rank, default=None)
    return {key: value for key, value in values.items() if value is not None}


# --- the command
# `polyphase doctor --compare A B`: compares two runs, in the terminal or as JSON.


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
        print(for_terminal(f"polyphase: error: {error}", has_lines=True), file=sys.stderr)
        return 2
    if "--json" in words:
        print(json.dumps(comparison.plain(), indent=2))
    else:
        _show_comparison(comparison, Console())
    return 0


def _show_comparison(comparison: Comparison, console: Console) -> None:
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
            console.print(f"  {key}: {_describe_change(values)}", highlight=False, markup=False, soft_wrap=True)
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
