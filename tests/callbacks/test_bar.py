import re
import time
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.cells import cell_len
from rich.console import Console

from polyphase.callbacks._bar import BarRenderer, Progress, metric_texts

THEME = RichProgressBarTheme(metrics_text_delimiter="  ")


def rows_of(columns, progress=None, metrics=(), height=40):
    console = Console(width=columns, height=height, color_system=None, force_terminal=False, force_jupyter=False)
    return BarRenderer(console, THEME).rows(progress or halfway(), metrics)


def halfway(description="Epoch 12/15", total=1234.0):
    progress = Progress(description, total)
    time.sleep(0.001)
    progress.advance_to(617)
    return progress


texts = st.text(st.characters(whitelist_categories=("Ll", "Lu", "Nd", "Lo"), whitelist_characters="_/. "), min_size=1)


@given(st.integers(20, 150), st.lists(texts.map(str.strip).filter(bool), max_size=30))
def test_no_row_is_wider_than_the_terminal_and_no_metric_is_cut(columns, metrics):
    bar, *rows = rows_of(columns, metrics=metrics, height=10_000)
    assert max(map(cell_len, [bar, *rows])) < columns
    assert "".join("".join(rows).split()) == "".join("".join(metrics).split())


def test_a_metric_that_fits_in_a_row_is_in_one_row():
    metrics = [f"a_metric_{i} {'9' * (i + 1)}" for i in range(30)]
    rows = rows_of(50, metrics=metrics)[1:]
    assert [text for row in rows for text in row.split("  ")] == metrics
    assert len(rows) < 30


def test_more_metrics_than_a_small_window_has_room_for_are_counted():
    rows = rows_of(30, metrics=[f"{'name' * 5} {i}" for i in range(20)], height=10)
    assert len(rows) == 8
    assert rows[-1] == "... and 14 more rows of metric"[:29]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (120, r"Epoch 12/15  ━{19,20}[━╸ ] {19,20}  617/1234  0:00:00  eta 0:00:00  \d+\.\d it/s"),
        (70, r"Epoch 12/15  ━+╸? {4,} 617/1234  0:00:00  eta 0:00:00  \d+\.\d it/s"),
        (50, r"Epoch 12/15  ━+╸? {4,} 617/1234  0:00:00"),
        (32, r"Epoch 12/15  ━{4} {4}  617/1234"),
        (25, r"Epoch 12/15  617/1234"),
        (18, r"Epoch .+617/1234"),
    ],
)
def test_columns_are_dropped_from_the_end_where_there_is_no_room(columns, expected):
    (row,) = rows_of(columns)
    assert re.fullmatch(expected, row), row


def test_an_unknown_length_has_no_end():
    (row,) = rows_of(100, halfway(total=inf))
    assert "617/?" in row
    assert "eta" not in row


def test_the_speed_leaves_out_what_was_done_in_between():
    progress = Progress("Epoch 1/1", 100)
    time.sleep(0.05)
    progress.advance_to(50)
    speed, left = progress.batches_per_s, progress.remaining_s
    assert 0 < speed <= 1000
    assert left == pytest.approx(50 / speed)
    time.sleep(0.2)  # a validation
    progress.resume()
    assert progress.batches_per_s == speed, "the last known one"
    time.sleep(0.001)
    progress.advance_to(60)
    assert progress.batches_per_s > 10 / 0.2
    progress.advance_to(100)
    assert progress.remaining_s is None


def test_metrics_are_written_alike_by_all_bars():
    metrics = {
        "v_num": 3,
        "loss": torch.tensor(0.123456),
        "lr": 1e-5,
        "steps": 12,
        "name": "x",
        "pair": torch.ones(2),
    }
    assert [*metric_texts(metrics)] == [
        "loss 0.1235",
        "lr 1e-05",
        "steps 12",
        "name x",
        "pair tensor([1., 1.])",
    ]
