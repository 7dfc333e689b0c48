"""What benchmarks share: where and when they ran, a report as Markdown, and a plot where matplotlib is installed."""

import datetime
import importlib.util
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import lightning
import torch

__all__ = ["Table", "about", "write_report"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that have the same columns."""

    title: str
    rows: list[dict[str, str]]

    def __str__(self) -> str:
        columns = list(self.rows[0])
        lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in self.rows)]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def about(command: str) -> str:
    """Date, machine, versions and command."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}"
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True).stdout
    return (
        f"{datetime.date.today()}, {_processor()}, {versions}, commit {commit.strip() or 'unknown'}\n\n    {command}\n"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    return f"{text.count('processor	')} cores of {model[1] if model else platform.processor() or platform.machine()}"


def write_report(path: Path, title: str, where: str, tables: list[Table], *, plot: bool = True) -> None:
    """Writes and prints the report, and a plot of the first table beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {title}\n", where, *map(str, tables)])
    path.write_text(text)
    print(text)
    if not plot:
        return
    if importlib.util.find_spec("matplotlib"):
        _plot(path.with_suffix(".svg"), tables[0])
    else:
        print("(no plot: matplotlib is not installed)")


def _plot(path: Path, table: Table) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    names = [c for c in table.rows[0] if c.endswith(", us") and not c.startswith("by hand")]
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        bars = [(y, float(row[name].split()[0])) for y, row in enumerate(table.rows) if row[name]]
        axes.barh([y + i * height for y, _ in bars], [us for _, us in bars], height, label=name.removesuffix(", us"))
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(table.rows))], [row["case"] for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel("us per micro-batch, on top of the loop by hand")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
