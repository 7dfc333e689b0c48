"""Findings of all rules: none in a healthy run, none too early, the most costly first."""

from pathlib import Path

import pytest

from polyphase.doctor import RULES, judge

from .runs import changed, interval, run_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_healthy_run_has_no_finding(num_ranks):
    assert judge(run_of(*[interval()] * num_ranks)).findings == []
    assert judge(run_of(*[interval()] * num_ranks)).lines()[1] == "  nothing stands out"


def test_the_most_costly_comes_first():
    slow = changed(interval(data_wait=5.0, callbacks=2.0), by_hook={"Draws.on_train_batch_end": 0.2})
    assert [finding.cause for finding in judge(run_of(slow)).findings] == ["slow_loader", "slow_callback"]


def test_few_steps_are_not_judged():
    verdict = judge(run_of(interval(num_steps=9, data_wait=50.0)))
    assert verdict.findings == []
    assert verdict.caveats == ["9 steps were measured after the first ones: 10 are needed to judge"]


def test_the_warm_up_is_left_out():
    run = run_of(interval())
    run.intervals[0].insert(0, changed(interval(step=3, num_steps=3, compute=900.0), is_warmup=True))
    assert judge(run).figures.step_s == pytest.approx(0.01)


def test_a_rank_that_is_missing_is_named():
    run = run_of(interval(), interval())
    del run.ranks[1], run.intervals[1]
    assert judge(run).caveats == ["ranks 1 are missing, whose files may lie on other hosts"]


def test_the_page_has_the_table_of_the_rules():
    text = (ROOT / "docs" / "reference" / "doctor.md").read_text()
    for rule in RULES:
        assert f"| `{rule.cause}` | {rule.threshold:g} | {rule.of} |" in text, rule.cause
