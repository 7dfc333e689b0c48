"""What a person sees while a run goes on, in a pseudo-terminal of some size; see `terminal_job.py`."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed import ROOT, free_port
from tests.pairs import nightly
from tests.terminal import Shown, Terminal

from .terminal_job import LONG, NUM_BATCHES

JOB = Path(__file__).parent / "terminal_job.py"
ENTRIES = ("fit", "validate", "test", "predict")
BAR = re.compile(
    r"(Epoch \d+/\d+(?:, validation \d/\d)?|Sanity Checking|Validation \d/\d|Testing|Predicting)"
    r"  (\S+ +)?(\d+)/(\d+)  .*"
)
EPOCH = re.compile(r"epoch \d/2  [\d.]+ s  .*train/loss \S+.*")
DESCRIPTIONS = {"validate": "Validation 2/2", "test": "Testing", "predict": "Predicting"}
MARKS = {
    "train-0": "Epoch 1/2",
    "validation-0": "Epoch 1/2, validation 1/2",
    "validation-1": "Epoch 1/2, validation 2/2",
    "train-1": "Epoch 2/2",
    "validate-0": "Validation 1/2",
    "validate-1": "Validation 2/2",
    "test": "Testing",
    "predict": "Predicting",
}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]


def printed(num_ranks: int, entries: tuple[str, ...]) -> Counter[str]:
    """The lines that are printed by Python's streams."""
    val = [f"validation {i}.{batch}" for i, length in enumerate((NUM_BATCHES, 5)) for batch in range(length)]
    sanity = [f"validation {i}.{batch}" for i in range(2) for batch in range(2)]
    train = [f"training {epoch}.{batch}" for epoch in range(2) for batch in range(NUM_BATCHES)]
    said = {
        "fit": [*sanity, *train, *val, *val],
        "validate": val,
        "test": [f"test {batch}" for batch in range(NUM_BATCHES)],
        "predict": [f"prediction {batch}" for batch in range(NUM_BATCHES)],
    }
    texts = [text for entry in entries for text in said[entry]]
    ranks = range(num_ranks)
    lines = Counter(
        f"<{kind} of rank {rank}: {text}>" for kind in ("print", "error") for rank in ranks for text in texts
    )
    return lines + Counter({"<its second line>": len(texts) * num_ranks, "<the end>": 1})


def bars(rows: list[str]) -> list[re.Match[str]]:
    return [match for row in rows if (match := BAR.fullmatch(row))]


def check_every_row(shown: Shown, num_ranks: int, entries: tuple[str, ...] = ENTRIES) -> None:
    """Each line is whole, each epoch leaves a line, each other entry point a full bar, and results are there once."""
    assert shown.returncode == 0, shown.rows
    assert shown.is_left_usable
    lines = Counter(row for row in shown.rows if row.startswith("<") and "C++" not in row)
    assert lines == printed(num_ranks, entries), shown.rows
    rows = [row for row in shown.rows if "━━" in row and not row.startswith(("┏", "┡"))]
    left = bars(rows)
    assert [match[1] for match in left] == [DESCRIPTIONS[entry] for entry in entries if entry != "fit"], rows
    assert len([row for row in shown.rows if EPOCH.fullmatch(row)]) == 2 * ("fit" in entries), shown.rows
    assert len(left) == len(rows), rows
    assert all(match[3] == match[4] for match in left), rows
    for entry, name in (("validate", "val/loss "), ("test", "test/loss ")):
        tables = [row for row in shown.rows if row.startswith("│") and name in row]
        assert len(tables) == (entry in entries), shown.rows


def check_marks(shown: Shown, entries: tuple[str, ...] = ENTRIES) -> None:
    """In the middle there is one bar, at the bottom, with its metrics."""
    first = {name.split("-")[0] for name in shown.marks}
    assert {"validate", "test", "predict"} & set(entries) <= first, first
    for name, rows in shown.marks.items():
        moving = [i for i, row in enumerate(rows) if (match := BAR.fullmatch(row)) and match[3] != match[4]]
        assert len(moving) == 1, (name, rows)
        (at,) = moving
        match = BAR.fullmatch(rows[at])
        assert match, rows
        assert match[1] == MARKS[name]
        assert int(match[3]) in (3, 4), rows[at]
        assert rows[at - 1] == "", "an empty row for what others print"
        below = " ".join(rows[at + 1 :])
        if name.startswith(("train", "validation")):
            names = ["train/loss", LONG, *(f"train/part_{i}" for i in range(4))]
            names += ["val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1"] if name == "train-1" else []
            number = r"-?\d\S*"
            assert re.fullmatch(" +".join(f"{each} {number}" for each in names), below), below
        else:
            assert below == "", "no metrics of training"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "columns", "later"),
    [
        ("ddp_fork", 120, 80),
        # .ci/run has a demo under ddp in a terminal.
        *nightly(("single", 80, 120), ("ddp", 80, 120), ("fsdp", 80, 80), ("torchrun", 120, 120)),
    ],
)
def test_one_bar_at_the_bottom_and_whole_lines(tmp_path, strategy, columns, later):
    """Whatever the launcher, and where the window's size changes in mid-training."""
    num_ranks = 1 if strategy == "single" else 2
    flags = ["--devices", str(num_ranks), "--strategy", "ddp" if strategy == "torchrun" else strategy]
    is_script = strategy in ("single", "ddp_fork")
    launcher = [] if is_script else [sys.executable, *(TORCHRUN if strategy == "torchrun" else [])]
    terminal = Terminal(columns, at={"train-1": lambda terminal: terminal.resize(later)})
    shown = terminal.run([*launcher, JOB, *flags], folder=tmp_path, timeout_s=200, is_script=is_script)
    check_every_row(shown, num_ranks)
    check_marks(shown)
    assert len(shown.marks) == len(MARKS)
    assert "<a line of a library in C++>" in shown.rows or num_ranks == 1


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_spawned_processes_and_no_colours(tmp_path):
    flags = ["--strategy", "ddp_spawn", "--devices", "2", "--entries", "fit"]
    shown = Terminal().run([sys.executable, JOB, *flags], folder=tmp_path, timeout_s=200, environment={"NO_COLOR": "1"})
    check_every_row(shown, 2, ("fit",))
    check_marks(shown, ("fit",))
    styles = {int(code) for codes in re.findall(r"\x1b\[([\d;]*)m", shown.raw) for code in codes.split(";") if code}
    assert not [code for code in styles if code >= 30], styles


def test_a_terminal_without_escape_codes_gets_plain_lines(tmp_path):
    command = [JOB, "--entries", "fit", "test"]
    shown = Terminal(120).run(command, folder=tmp_path, environment={"TERM": "dumb"}, is_script=True)
    assert shown.returncode == 0, shown.rows
    assert "\x1b" not in shown.raw
    assert not bars(shown.rows)
    steps = [row.split("  ")[:2] for row in shown.rows if row.startswith("epoch ")]
    # A name is as long as the line: what comes after it is in the next row, as of any text.
    assert steps == [[f"epoch {1 + step // 8}/2", f"step {step}/12"] for step in (2, 4, 6, 8, 10, 12)]
    assert sum("test/loss" in row for row in shown.rows) == 1


@pytest.mark.parametrize("strategy", ["single", *nightly("ddp")])
def test_ctrl_c_leaves_the_bar_where_it_was_and_the_terminal_usable(tmp_path, strategy):
    terminal = Terminal(at={"train-0": lambda terminal: terminal.type("\x03")})
    flags = ["--strategy", strategy, "--devices", "1" if strategy == "single" else "2", "--entries", "fit"]
    is_script = strategy == "single"
    launcher = [] if is_script else [sys.executable]
    shown = terminal.run([*launcher, JOB, *flags], folder=tmp_path, is_script=is_script)
    assert shown.returncode not in (0, -9), shown.rows
    assert shown.is_left_usable
    (left,) = bars(shown.rows)
    assert left[1] == "Epoch 1/2"
    # Several ranks agree on the step after which they stop, which may be the last one.
    assert 3 <= int(left[3]) < NUM_BATCHES + (strategy != "single")
    assert sum("Detected KeyboardInterrupt" in row for row in shown.rows) == 1
    assert "<the end>" not in shown.rows


@pytest.mark.nightly  # .ci/run has the demo in a terminal, too
@pytest.mark.timeout(240)
def test_the_demo_of_the_makefile(tmp_path):
    (command,) = re.findall(r"^demo:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = command.replace("$(BIN)/python", sys.executable).replace("examples/", f"{ROOT}/examples/")
    shown = Terminal(100).run(["bash", "-c", command], folder=tmp_path, timeout_s=200)
    assert shown.returncode == 0, shown.rows
    assert shown.is_left_usable
    (accuracy,) = [row for row in shown.rows if "test accuracy" in row or "test/accuracy" in row]
    assert float(accuracy.removeprefix("test accuracy ")) >= 0.97
    assert [match[1] for match in bars(shown.rows)] == ["Testing"]
    assert len([row for row in shown.rows if re.match(r"epoch \d+/15  [\d.]+ s  train/loss ", row)]) == 15
