"""The pictures of the two stories, drawn from the results of real runs under `benchmarks/results`."""

import csv
import re
from pathlib import Path

from .drawing import COLOURS, Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LEFT, BARS, ROW = 140, 210, 24
PLOT, TALL, EDGE = 500, 170, 52


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


def draw_killed() -> Drawing:
    """The losses of both runs by step, and their steps by time, with each kill."""
    with (RESULTS / "killed-cpu.csv").open(newline="") as file:
        runs: dict[str, list[tuple[float, int, float]]] = {}
        for run, second, step, loss in list(csv.reader(file))[1:]:
            runs.setdefault(run, []).append((float(second), int(step), float(loss)))
    drawing = Drawing("A run that was killed nine times, and one that was not", PLOT + EDGE + 20)
    last_step = max(step for run in runs.values() for _, step, _ in run)
    last_second = max(second for run in runs.values() for second, _, _ in run)
    most = max(loss for run in runs.values() for _, _, loss in run)
    kills = [int(row["at step"]) for row in rows_of("killed-cpu.md", "Kills")]

    def x_of(share: float) -> float:
        return EDGE + share * PLOT

    for top, title, end in ((40, "loss, by step", f"{last_step}"), (270, "step, by seconds", f"{last_second:.0f} s")):
        drawing.text(EDGE, top - 12, title, "bold")
        drawing.box(EDGE, top, PLOT, TALL, "empty", 0)
        drawing.text(EDGE, top + TALL + 16, "0", "soft")
        drawing.text(EDGE + PLOT, top + TALL + 16, end, "soft", "end")
    for y, words in ((52, f"{most:.1f}"), (210, "0"), (282, f"{last_step}"), (440, "0")):
        drawing.text(EDGE - 6, y, words, "soft", "end")
    for step in kills:
        drawing.curve([(x_of(step / last_step), 40), (x_of(step / last_step), 40 + TALL)], COLOURS[3], 0.8)
    for number, (name, points) in enumerate(runs.items()):
        losses = {step: loss for _, step, loss in points}  # of steps that were done again, the last time counts
        by_step = [(x_of(step / last_step), 40 + TALL - loss / most * TALL) for step, loss in sorted(losses.items())]
        by_time = [(x_of(second / last_second), 270 + TALL - step / last_step * TALL) for second, step, _ in points]
        drawing.curve(by_step, COLOURS[number], 5 if number == 0 else 1.4)
        drawing.curve(by_time, COLOURS[number], 1.6)
        drawing.bar(EDGE + number * 130, 464, 12, 12, COLOURS[number])
        drawing.text(EDGE + number * 130 + 18, 475, name, "soft")
    drawing.bar(EDGE + 260, 464, 2, 12, COLOURS[3])
    drawing.text(EDGE + 270, 475, "a kill", "soft")
    return drawing
