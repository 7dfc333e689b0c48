"""Two runs beside each other: which one is faster, in which phases, and what was set up differently."""

import dataclasses
import json

import pytest

from polyphase.doctor import Run, write_rank
from polyphase.doctor.compare import compare_runs, phase_text
from tests.doctor.runs import info, interval, run_of
from tests.doctor.test_command import doctor


def slow(**fields):
    return run_of(interval(data_wait=50.0), interval(data_wait=50.0), num_workers=0, **fields)


def quick(**fields):
    return run_of(interval(), interval(), num_workers=4, **fields)


def test_a_run_that_is_faster_by_its_loader():
    comparison = compare_runs(slow(versions={"torch": "2.13"}), quick(versions={"torch": "2.14"}))
    assert comparison.speedup == pytest.approx(59.9 / 10)
    assert comparison.setup == {"num_workers": (0, 4), "torch": ("2.13", "2.14")}
    (reason,) = comparison.reasons()
    assert phase_text(reason, comparison) == (
        "data wait: 50 ms -> 0.1 ms a step, 100% of the difference; num_workers 0 -> 4"
    )
    assert comparison.plain()["findings"] == [["slow_loader"], []]
    assert comparison.figures["step_ms"] == pytest.approx((59.9, 10.0))


def test_the_other_way_round():
    comparison = compare_runs(quick(), slow())
    assert comparison.speedup == pytest.approx(10 / 59.9)
    assert [each.phase for each in comparison.reasons()] == ["data_wait"]


def test_runs_that_are_alike():
    comparison = compare_runs(quick(), run_of(interval(compute=8.1), interval(compute=8.1), num_workers=4))
    assert comparison.is_same
    assert comparison.reasons() == []
    assert comparison.setup == {}


def test_batches_of_other_sizes_are_compared_by_the_sample():
    double = dataclasses.replace(interval(compute=12.0), num_samples=1600)
    comparison = compare_runs(quick(), run_of(double, double, num_workers=4))
    assert comparison.unit == "sample"
    assert comparison.speedup == pytest.approx((10.0 / 16) / (14.0 / 32))
    assert comparison.figures["samples_per_step"] == (16.0, 32.0)


def test_flags_that_one_of_them_has():
    before, after = quick(flags={"compile": True, "resume": "auto"}), quick(flags={"precision": "bf16-mixed"})
    assert compare_runs(before, after).setup == {"compile": (True, None), "precision": (None, "bf16-mixed")}


def test_a_run_without_a_step_is_refused():
    with pytest.raises(ValueError, match="the second run has no measured step"):
        compare_runs(quick(), Run({0: info(0)}, {0: []}))


@pytest.fixture
def folders(tmp_path):
    for name, run in (("a", slow()), ("b", quick())):
        (tmp_path / name / "doctor").mkdir(parents=True)
        for rank, intervals in run.intervals.items():
            write_rank(str(tmp_path / name / "doctor" / f"rank_{rank}.jsonl"), run.ranks[rank], intervals)
    return tmp_path / "a", tmp_path / "b"


def test_in_the_terminal(monkeypatch, capsys, folders):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = doctor(monkeypatch, capsys, "--compare", *folders)
    assert code == 0
    assert "The second run is 5.99 times as fast as the first one, by the time of a step." in out
    assert "data wait: 50 ms -> 0.1 ms a step" in out
    assert "no longer found: slow_loader" in out
    assert "num_workers: 0 -> 4" in out
    assert "samples_per_s" in out


def test_as_json(monkeypatch, capsys, folders):
    code, out, _ = doctor(monkeypatch, capsys, "--compare", *folders, "--json")
    assert code == 0
    plain = json.loads(out)
    assert plain["setup"] == {"num_workers": [0, 4]}
    assert plain["reasons"] == [{"phase": "data_wait", "related": ["num_workers"]}]


def test_errors(monkeypatch, capsys, folders):
    code, _, said = doctor(monkeypatch, capsys, "--compare", folders[0])
    assert code == 2
    assert "doctor --compare takes two runs, but got" in said
    code, _, said = doctor(monkeypatch, capsys, "--compare", *folders, "--jsn")
    assert code == 2
    assert "--json" in said
    code, _, said = doctor(monkeypatch, capsys, "--compare", folders[0], folders[0].parent / "none")
    assert code == 2
    assert "there is no doctor/rank_0.jsonl" in said
