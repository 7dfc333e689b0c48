"""The runner of the GPU suite: what becomes of a check that fails, hangs or crashes, and of reports in parts."""

import dataclasses
import json
import os
import signal
import time

import pytest

from benchmarks.gpu import device, suite
from benchmarks.gpu.child import Process, elsewhere
from benchmarks.gpu.goals import goals
from benchmarks.gpu.runner import Results, run
from benchmarks.gpu.suite import ITEMS, Item

HERE = "tests.benchmarks.test_gpu"
ABOUT = {"name": "A Device, 80GB", "devices": 1}


def passes(*words: str) -> str:
    return "seen " + " ".join(words)


def fails() -> str:
    print("what it printed")
    raise AssertionError("2 > 1")


def does_not_apply() -> str:
    device.needs_cuda("a test")
    return "unreachable on a device of no name"


def crashes() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "unreachable"


def hangs() -> str:
    if os.fork() == 0:  # a process of its own, which has to go with it
        time.sleep(600)
    time.sleep(600)
    return "unreachable"


def rows() -> dict[str, str]:
    return dict.fromkeys(("size", "strategy", "compile", "devices", "tokens per step"), "a") | {
        "loop": "Trainer", "tokens/s": "7"
    }  # fmt: skip


def item(name: str, part: int = 1, limit_s: float = 60, **fields) -> Item:
    return Item(name, f"that {name}", f"{HERE}:{name}", part, limit_s, **fields)


@pytest.fixture(autouse=True)
def no_device():
    device.choose("no device", smoke=True)
    yield
    device.choose("cuda", smoke=False)


@pytest.fixture(
    params=[pytest.param(True, id="fork"), pytest.param(False, id="interpreter", marks=pytest.mark.nightly)]
)
def forks(request, monkeypatch):
    monkeypatch.setattr(Process, "forks", request.param)
    return request.param


@pytest.mark.timeout(240)
def test_a_run_goes_on_whatever_a_check_does(tmp_path, forks, capsys):
    items = [
        item("fails"),
        item("crashes"),
        item("hangs", limit_s=1 if forks else 30),
        item("does_not_apply"),
        item("passes", arguments=("a", "b")),
        item("rows", is_figure=True),
    ]
    results = Results(tmp_path, ABOUT, "where it ran", items)
    run(items, results, "abc123")
    statuses = {name: record["status"] for name, record in results.records.items()}
    assert statuses == {
        "fails": "failed",
        "crashes": "failed",
        "hangs": "timed out",
        "does_not_apply": "not run",
        "passes": "ok",
        "rows": "ok",
    }
    assert results.bad == ["fails", "crashes", "hangs"]
    report = (tmp_path / "gpu-a-device-80gb.md").read_text()
    for text in (
        "where it ran",
        "| fails | that fails | failed |",
        "AssertionError: 2 > 1",
        "what it printed",
        "Fatal Python error: Segmentation fault",
        "in hangs",
        "the process ended by SIGSEGV",
        f"no end after {items[2].limit_s} s",
        "needs CUDA: a test",
        "seen a b",
        "| size | strategy | compile | devices | tokens per step | loop | tokens/s |",
        "| a | a | a | a | a | Trainer | 7 |",
    ):
        assert text in report
    assert "timed out" in capsys.readouterr().out


def test_a_later_part_keeps_what_an_earlier_one_wrote(tmp_path):
    items = [item("passes", 1), item("fails", 2), item("rows", 2, is_figure=True)]
    run(items[:1], Results(tmp_path, ABOUT, "the first", items), "abc123")
    path = tmp_path / "gpu-a-device-80gb.md"
    assert "| fails | that fails | not run |" in path.read_text()
    assert "Not run: rows." in path.read_text()
    second = Results(tmp_path, ABOUT, "the second", items)
    run(items[1:], second, "def456")
    report = path.read_text()
    assert "| passes | that passes | ok |" in report
    assert "abc123 |" in report
    assert "def456 |" in report
    assert second.bad == ["fails"]
    run([dataclasses.replace(items[1], place=f"{HERE}:passes")], second, "def456")
    last = Results(tmp_path, ABOUT, "", items)
    assert last.bad == [], "what has been mended is run again, and replaced"
    assert [last.is_known(found, "def456") for found in items] == [False, True, True]
    assert not last.is_known(items[1], "def456 + changes"), "changes may be others"


def row(size, strategy, compiled, loop, tokens_per_s, mfu) -> dict[str, str]:
    return {
        "size": size, "strategy": strategy, "compile": compiled, "devices": "1", "tokens per step": "16384",
        "loop": loop, "tokens/s": str(tokens_per_s), "MFU": f"{mfu}%", "host waits per step": "0",
    }  # fmt: skip


def test_goals_are_reached_or_missed():
    figures = [
        row("124M", "single", "yes", "Engine", 1000, 41.0),
        row("124M", "single", "yes", "by hand", 1020, 41.5),
        row("124M", "tp", "yes", "Engine", 960, 39.0),
        row("124M", "single", "yes", "Engine bf16-blocks", 1020, 41.5),
        row("1.3B", "single", "no", "Engine", 100, 41.9),
        row("1.3B", "fsdp", "yes", "Engine", 100, 47.0),
        row("1.3B", "fsdp", "yes", "Engine float8", 113, 53.0),
    ]
    records = {
        **{str(i): {"status": "ok", "value": figure} for i, figure in enumerate(figures)},
        "averages": {"status": "ok", "value": "25 MB int8: 26.9 GB/s, peak 3.9 buckets; 1024 MB int8: 801.0 GB/s"},
        "failed": {"status": "failed", "value": None},
    }
    found = {row["goal"]: (row["seen"], row["verdict"]) for row in goals(records)}
    assert found == {
        "MFU of 124M single, compiled, 16384 tokens": ("41.0%", "reached"),
        "124M single, compiled, 16384 tokens, of a loop by hand": ("0.980", "missed"),
        "host waits of 124M single, compiled, 16384 tokens": ("0", "reached"),
        "MFU of 124M single, compiled, 16384 tokens, bf16-blocks": ("41.5%", "reached"),
        "host waits of 124M single, compiled, 16384 tokens, bf16-blocks": ("0", "reached"),
        "124M tp, compiled, 16384 tokens, of single": ("0.960", "reached"),
        "host waits of 124M tp, compiled, 16384 tokens": ("0", "reached"),
        "MFU of 1.3B single, 16384 tokens": ("41.9%", "missed"),
        "host waits of 1.3B single, 16384 tokens": ("0", "reached"),
        "host waits of 1.3B fsdp, compiled, 16384 tokens": ("0", "reached"),
        "float8 of 1.3B fsdp, compiled, 16384 tokens, of bf16": ("1.130", "reached"),
        "int8 of 25 MB": ("26.9 GB/s", "missed"),
        "int8 of 1024 MB": ("801.0 GB/s", "reached"),
        "powersgd:4 of 25 MB": ("", "unknown"),
        "powersgd:4 of 1024 MB": ("", "unknown"),
        **{f"MFU of {size} single, compiled": ("", "unknown") for size in ("350M", "1.3B")},
        **{f"MFU of {size} single": ("", "unknown") for size in ("124M", "350M")},
    }


def test_what_is_known_is_written_after_each_check(tmp_path):
    items = [item("passes"), item("fails")]
    seen = []

    def say(line: str) -> None:
        seen.append(list(json.loads((tmp_path / "gpu-a-device-80gb.json").read_text())))

    run(items, Results(tmp_path, ABOUT, "", items), "abc123", say=say)
    assert seen == [["passes"], ["passes", "fails"]]


def test_a_part_ends_in_time(tmp_path):
    items = [item("hangs"), item("passes")]
    results = Results(tmp_path, ABOUT, "", items)
    began = time.monotonic()
    run(items, results, "abc123", limit_s=6)
    assert time.monotonic() - began < 20
    assert [record["status"] for record in results.records.values()] == ["timed out", "not run"]
    assert "the 6 s of its part were over" in results.text()


def test_the_table_has_29_checks_that_are_there():
    checks = [found for found in ITEMS if not found.is_figure]
    assert len(checks) == 29
    assert len({found.name for found in ITEMS}) == len(ITEMS)
    assert {found.part for found in ITEMS} == set(suite.PARTS)
    outcome = elsewhere(f"{HERE}:places", limit_s=120)
    assert outcome.value == [found.place for found in ITEMS], outcome


def places() -> list[str]:
    import importlib

    modules = [found.place.partition(":") for found in suite.ITEMS]
    return [f"{m}:{name}" for m, _, name in modules if callable(getattr(importlib.import_module(m), name, None))]
