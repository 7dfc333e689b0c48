"""The benchmark runs to its end and reports every case; its figures are for machines with nothing else to do."""

import importlib.util
import re
import sys

import pytest

from tests.distributed import ROOT, Finished, run_command


def overhead(*arguments, timeout_s: float = 120) -> Finished:
    return run_command([sys.executable, ROOT / "benchmarks" / "overhead.py", *arguments], timeout_s=timeout_s)


@pytest.mark.nightly
def test_the_report_has_every_case_and_contestant(tmp_path):
    finished = overhead("--rounds", "1", "--steps", "5", "--output", tmp_path)
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "overhead-cpu.md").read_text()
    assert report in finished.output
    for row in (
        "| no logging |",
        "| one logged value |",
        "| five logged values, two on the bar |",
        "| TensorBoard, progress bar, checkpoint |",
        "| the same, each its own bar |",
        "| accumulation of 4 |",
        "| validation, one logged value |",
        "| the difference, s |",
        "| Trainer.fit to first training_step, ms |",
        "| by hand |",
        "| Engine |",
    ):
        assert row in report
    assert "    python benchmarks/overhead.py --rounds 1 --steps 5\n" in report
    assert ("Accelerate is not installed" in report) != ("| Accelerate, us |" in report)
    assert str(tmp_path) not in report, "a report names no folder of the machine"
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in (tmp_path / "overhead-cpu.svg").read_text()
    else:
        assert "(no plot: matplotlib is not installed)" in finished.output


def test_cases_choose_what_runs(tmp_path):
    finished = overhead("--quick", "--rounds", "1", "--cases", "accumulation", "--output", tmp_path)
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "overhead-cpu.md").read_text()
    assert "    python benchmarks/overhead.py --rounds 1 --steps 50 --cases accumulation\n" in report
    assert re.findall(r"^## (\w+)", report, re.MULTILINE) == ["Own"]
    assert report.count("\n| ") == 3, "the header, the line below it and one case"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "expected a positive whole number, got '0'"),
        (["--cases", "noen"], "invalid choice: 'noen'"),
    ],
    ids=["rounds", "cases"],
)
def test_what_can_not_be_measured_is_an_error(tmp_path, arguments, message):
    finished = overhead(*arguments, "--output", tmp_path)
    assert finished.returncode == 2, finished.output
    assert message in finished.output
    assert not list(tmp_path.iterdir())
