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

__all__ = ["Table", "about", "slug", "write_report"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that have the same columns."""

    title: str
    rows: list[dict[str, str]]

    def __str__(self) -> str:
        columns = list(self.rows[0])
        lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in self.rows)]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def slug(name: str) -> str:
    """A device's name, as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


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
        import figures  # beside the script that runs; the GPU suite, which needs `about` alone, runs as a package

        figures.overhead(path.with_suffix(".svg"), tables[0].rows)
    else:
        print("(no plot: matplotlib is not installed)")
