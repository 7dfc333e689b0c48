"""The pictures of the stories, drawn from the results of real runs under `benchmarks/results`."""

import re
from pathlib import Path

from .drawing import COLOURS, Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LEFT, BARS, ROW = 140, 210, 24


def rows_of(name: str, heading: str) -> list[dict[str, str]]:
    """The rows of the table under a heading of a report, by column."""
    text = (RESULTS / name).read_text().partition(f"## {heading}")[2]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    end = next((i for i, line in enumerate(lines) if i > 1 and len(line) != len(lines[0])), len(lines))
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:end]]


def draw_one_to_eight() -> Drawing:
    """What a rank holds and sends under each strategy: two bars for each."""
    drawing = Drawing("What a rank holds and what it sends in a step", LEFT + 2 * BARS + 90)
    rows = rows_of("strategies-cpu.md", "ByteGPT")
    columns = ("held by the largest rank, MB", "sent by a rank in a step, MB")
    for number, (column, title) in enumerate(zip(columns, ("holds, MB", "sends in a step, MB"), strict=True)):
        left = LEFT + number * (BARS + 40)
        drawing.text(left, 22, title, "bold")
        most = max(float(row[column]) for row in rows)
        for place, row in enumerate(rows):
            y, value = 34 + place * ROW, float(row[column])
            if not number:
                drawing.text(10, y + 12, row["strategy"].partition(":")[0], "code")
                drawing.text(LEFT - 12, y + 12, f"x {row['ranks']}", "soft", "end")
            drawing.bar(left, y, value / most * (BARS - 40), 15, COLOURS[number])
            drawing.text(left + value / most * (BARS - 40) + 5, y + 12, f"{value:.0f}", "soft")
    return drawing
