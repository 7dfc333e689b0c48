"""The figures beside the reports, drawn from what the reports say: ``python benchmarks/figures.py`` draws them again.

Methods that belong together have one colour; a dashed line is torch's own, or one without error feedback.
"""

import csv
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["convergence", "overhead", "wire"]

RESULTS = Path(__file__).parent / "results"
_COLOURS = {
    "none": "#000000",
    "plain": "#7f7f7f",
    "compute alone": "#bbbbbb",
    "bf16": "#1f77b4",
    "fp16": "#17becf",
    "int8": "#9467bd",
    "powersgd:2": "#e7298a",
    "powersgd:4": "#d62728",
    "powersgd:4+fp16": "#ff9e4a",
    "topk:0.1": "#98c950",
    "topk:0.01": "#2ca02c",
    "sign": "#8c564b",
}
_BITS = {"25mbit": 25e6, "100mbit": 1e8, "1gbit": 1e9, "unlimited": 1e10}


def short(name: str) -> str:
    """The name of a method as a legend has it: without the step from which it compresses, which the title says."""
    return re.sub(r"[:,]start=(\{tenth\}|0)", "", name).replace(",feedback=false", ":feedback=false")


def _style(name: str) -> dict[str, Any]:
    method = short(name).removeprefix("torch ").removesuffix(":feedback=false")
    is_dashed = name.startswith("torch ") or name.endswith("feedback=false") or name in ("none", "compute alone")
    label = short(name).replace(":feedback=false", ", no error feedback")
    return {"color": _COLOURS[method], "linestyle": "--" if is_dashed else "-", "label": label}


def _axes(width: float, height: float, columns: int, title: str) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyphase"  # the same file from the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure, axes


def convergence(path: Path) -> None:
    """Training losses of the file ``.csv`` beside `path`; how far each is from `none`, since most curves coincide."""
    with path.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.reader(file))
    steps = [int(row[0]) for row in rows[1:]]
    curves = {name: [float(row[i]) for row in rows[1:]] for i, name in enumerate(rows[0]) if i}
    figure, (left, right) = _axes(
        11, 5, 2, "A small GPT on 2 processes: powersgd, topk and sign compress after a tenth of the steps"
    )
    for name, losses in curves.items():
        left.plot(steps, losses, **_style(name))
        if name != "none" and "none" in curves:
            differences = [100 * (loss / plain - 1) for loss, plain in zip(losses, curves["none"], strict=True)]
            right.plot(steps, differences, **_style(name))
    right.axhline(0, color=_COLOURS["none"], linestyle="--")
    right.set_yscale("symlog", linthresh=1)
    right.set_yticks([-1, 0, 1, 2, 5, 10, 20, 40], ["-1 %", "0", "+1 %", "+2 %", "+5 %", "+10 %", "+20 %", "+40 %"])
    left.set(title="Training loss", xlabel="step", ylabel="nats per byte")
    right.set(title="Difference from none", xlabel="step")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None})


def wire(path: Path, times_ms: dict[str, dict[str, float]]) -> None:
    """Time of a step by rate, and times faster than `none`, since some lines coincide.

    Args:
        path: of the figure.
        times_ms: by rate, of each contestant.
    """
    rates = list(times_ms)
    places = [_BITS[rate] for rate in rates]
    figure, (left, right) = _axes(11, 5.5, 2, "A step of a small GPT between two hosts, by the speed of their link")
    for name in times_ms[rates[0]]:
        times = [times_ms[rate][name] for rate in rates]
        left.loglog(places, times, marker="o", markersize=4, **_style(name))
        if name not in ("none", "compute alone"):
            faster = [times_ms[rate]["none"] / times_ms[rate][name] for rate in rates]
            right.loglog(places, faster, marker="o", markersize=4, **_style(name))
    right.axhline(1, color=_COLOURS["none"], linestyle="--")
    right.set_yticks([0.5, 1, 2, 4, 8, 16, 32, 64], ["0.5", "1", "2", "4", "8", "16", "32", "64"], minor=False)
    right.minorticks_off()
    for axes in (left, right):
        axes.set_xticks(places, rates)
        axes.minorticks_off()
        axes.set_xlabel("each end sends at most, per second")
    left.set(title="Time of a step", ylabel="ms")
    right.set(title="Times as fast as without compression (none)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Date": None})


def overhead(path: Path, rows: list[dict[str, str]]) -> None:
    """A trainer's own time in each case, from the rows of the table."""
    names = [column for column in rows[0] if column.endswith(", us") and not column.startswith("by hand")]
    figure, axes = _axes(9, 4.5, 1, "A trainer's own time per micro-batch: one CPU process, MLP 32-64-10, batch 8")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        bars = [(y, float(row[name].split()[0])) for y, row in enumerate(rows) if row[name]]
        drawn = axes.barh([y + i * height for y, _ in bars], [us for _, us in bars], height, label=name[:-4])
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("us, beyond a loop written by hand")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def tables(path: Path) -> dict[str, list[dict[str, str]]]:
    """The tables of a report, by their titles."""
    found: dict[str, list[dict[str, str]]] = {}
    title, columns = "", None
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            title, columns = line[3:], None
        elif line.startswith("| ---"):
            continue
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if columns is None:
                columns = cells
            else:
                found.setdefault(title, []).append(dict(zip(columns, cells, strict=True)))
    return found


def _times_ms(rows: Iterable[dict[str, str]]) -> dict[str, float]:
    return {row["contestant"]: float(row["step, ms"].split()[0]) for row in rows}


def main() -> None:
    convergence(RESULTS / "convergence-cpu.svg")
    found = tables(RESULTS / "wire-cpu.md")
    by_rate = {rate: next(rows for title, rows in found.items() if title.startswith(f"{rate}:")) for rate in _BITS}
    wire(RESULTS / "wire-cpu.svg", {rate: _times_ms(rows) for rate, rows in by_rate.items()})
    overhead(RESULTS / "overhead-cpu.svg", next(iter(tables(RESULTS / "overhead-cpu.md").values())))


if __name__ == "__main__":
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("python benchmarks/figures.py needs matplotlib: pip install matplotlib")
    main()
