"""Pictures of what each strategy splits and sends, all drawn alike from one table."""

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from .drawing import COLOURS, Drawing

CELL, GAP = 11, 2
GRID = 4 * (CELL + GAP)
CARD, BETWEEN, MARGIN = 192, 14, 12
STATES = ("parameters", "gradients", "optimizer")
SHORT = ("param.", "grad.", "optim.")

Holds = Callable[[int, int, int, str], bool]
"""Whether a rank holds a row (a layer) and column (a quarter of its tensors) of parameters, gradients or optimizer."""


class Picture(NamedTuple):
    """What is drawn of one strategy."""

    flag: str
    num_ranks: int
    holds: Holds
    samples: tuple[str, ...]
    """Of each rank, in a step of 8 samples."""
    sends: tuple[str, ...]
    """Lines below the ranks."""
    extra: str = ""
    """A line in each rank's card."""


def _all(rank: int, row: int, column: int, state: str) -> bool:
    return True


def _zero1(rank: int, row: int, column: int, state: str) -> bool:
    return state != "optimizer" or row % 2 == rank


def _fsdp(rank: int, row: int, column: int, state: str) -> bool:
    return column // 2 == rank


def _hsdp(rank: int, row: int, column: int, state: str) -> bool:
    return column // 2 == rank % 2


def _pp(rank: int, row: int, column: int, state: str) -> bool:
    return row // 2 == rank


def _pp_ddp(rank: int, row: int, column: int, state: str) -> bool:
    return row // 2 == rank // 2


def _fsdp_tp(rank: int, row: int, column: int, state: str) -> bool:
    return column == 2 * (rank % 2) + rank // 2


def _ps(rank: int, row: int, column: int, state: str) -> bool:
    return state != "optimizer" or row % 2 == rank


HALVES = ("0 2 4 6", "1 3 5 7")
PICTURES = {
    "single": Picture("single", 1, _all, ("0 1 2 3 4 5 6 7",), ("Nothing is sent.",)),
    "ddp": Picture(
        "ddp", 2, _all, HALVES, ("gradients: averaged over all ranks, once a step (all-reduce, during backward)",)
    ),
    "zero1": Picture(
        "zero1",
        2,
        _zero1,
        HALVES,
        ("gradients: averaged over all ranks, as under ddp", "parameters: each owner broadcasts those it has updated"),
    ),
    "fsdp": Picture(
        "fsdp",
        2,
        _fsdp,
        HALVES,
        (
            "parameters: gathered unit by unit, in forward and in backward (all-gather)",
            "gradients: averaged, each rank gets its shard (reduce-scatter)",
        ),
    ),
    "hsdp": Picture(
        "hsdp:replicate=2,shard=2",
        4,
        _hsdp,
        ("0 4", "1 5", "2 6", "3 7"),
        (
            "within a group (ranks 0 and 1, ranks 2 and 3): as fsdp",
            "between the groups: an all-reduce of the shards of the gradients",
        ),
    ),
    "tp": Picture(
        "tp:tp=2",
        2,
        _fsdp,
        ("0 1 2 3 4 5 6 7",) * 2,
        ("activations: summed after each attention and each MLP, forward and backward (all-reduce)",),
    ),
    "fsdp-tp": Picture(
        "fsdp+tp:tp=2",
        4,
        _fsdp_tp,
        ("0 2 4 6", "0 2 4 6", "1 3 5 7", "1 3 5 7"),
        (
            "ranks 0 and 1, ranks 2 and 3: activations, as under tp",
            "ranks 0 and 2, ranks 1 and 3: parameters and gradients, as under fsdp",
        ),
    ),
    "pp": Picture(
        "pp:pipeline_size=2",
        2,
        _pp,
        ("0 1 2 3 4 5 6 7",) * 2,
        ("forward: activations to the next stage; backward: their gradients back, in micro-batches",),
    ),
    "pp-ddp": Picture(
        "pp+ddp:pipeline_size=2,replicate=2",
        4,
        _pp_ddp,
        ("0 2 4 6", "1 3 5 7", "0 2 4 6", "1 3 5 7"),
        (
            "ranks 0 and 2, ranks 1 and 3: activations, as under pp",
            "ranks 0 and 1, ranks 2 and 3: gradients of a stage, averaged as under ddp",
        ),
    ),
    "local-sgd": Picture(
        "local_sgd:sync_every=16",
        2,
        _all,
        HALVES,
        (
            "15 steps: nothing is sent; each rank trains alone",
            "each 16th step: the changes of the parameters are averaged (all-reduce)",
        ),
        "+ parameters of last exchange",
    ),
    "ps": Picture(
        "ps:staleness=4",
        2,
        _ps,
        HALVES,
        (
            "gradients: to the rank that serves the parameter",
            "parameters: back from there, after a step with the mean gradient",
            "A rank may be 4 steps ahead of the slowest before it waits.",
        ),
        "+ parameters that it serves",
    ),
}
"""By the name of the file, ``strategy-NAME.svg``."""


def draw(name: str) -> Drawing:
    """The picture of one strategy: a card for each rank, and below what is sent."""
    picture = PICTURES[name]
    per_row = min(picture.num_ranks, 2)
    drawing = Drawing(f"What {picture.flag} splits and sends", 2 * MARGIN + 2 * CARD + BETWEEN)
    height = 122 + (16 if picture.extra else 0)
    for rank in range(picture.num_ranks):
        x = MARGIN + (rank % per_row) * (CARD + BETWEEN)
        y = MARGIN + (rank // per_row) * (height + BETWEEN)
        _rank(drawing, picture, rank, x, y, height)
    y = MARGIN + -(-picture.num_ranks // per_row) * (height + BETWEEN)
    lines = [part for line in picture.sends for part in textwrap.wrap(line, 58, subsequent_indent="  ")]
    drawing.lines(MARGIN, y + 10, lines)
    return drawing


def _rank(drawing: Drawing, picture: Picture, rank: int, x: float, y: float, height: float) -> None:
    drawing.box(x, y, CARD, height)
    drawing.text(x + 10, y + 19, f"rank {rank}", "bold")
    for number, state in enumerate(STATES):
        left = x + 10 + number * (GRID + 7)
        for row in range(4):
            for column in range(4):
                colour = COLOURS[rank] if picture.holds(rank, row, column, state) else None
                drawing.cell(left + column * (CELL + GAP), y + 28 + row * (CELL + GAP), CELL, colour)
        drawing.text(left, y + 28 + GRID + 12, SHORT[number], "soft")
    drawing.text(x + 10, y + 113, f"samples {picture.samples[rank]}", "soft")
    if picture.extra:
        drawing.text(x + 10, y + 129, picture.extra, "soft")


def draw_overview() -> Drawing:
    """The picture of the README: what two ranks hold under four strategies."""
    drawing = Drawing("What two ranks hold under four strategies", 700, wide=True)
    shown = (("ddp", "all"), ("zero1", "optim. divided"), ("fsdp", "shards"), ("pp", "layers"))
    for number, (name, note) in enumerate(shown):
        x = MARGIN + number * 172
        drawing.box(x, MARGIN, 160, 172)
        drawing.text(x + 10, MARGIN + 20, PICTURES[name].flag.partition(":")[0], "code bold")
        drawing.text(x + 150, MARGIN + 20, note, "soft", "end")
        for rank in range(2):
            top = MARGIN + 34 + rank * 62
            for column_of, state in enumerate(STATES):
                left = x + 10 + column_of * 49
                for row in range(4):
                    for column in range(4):
                        colour = COLOURS[rank] if PICTURES[name].holds(rank, row, column, state) else None
                        drawing.cell(left + column * 12, top + row * 13, 10, colour)
        for column_of, word in enumerate(SHORT):
            drawing.text(x + 10 + column_of * 49, MARGIN + 165, word, "soft")
    drawing.text(
        MARGIN,
        204,
        "Blue: rank 0, orange: rank 1. Rows are layers, columns parts of their tensors; hollow: not held.",
        "soft",
    )
    return drawing
