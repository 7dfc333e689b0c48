"""The rule about the rest of a step, where no other finds anything."""

import pytest

from polyphase.doctor import judge
from tests.doctor.runs import changed, interval, only, run_of


def test_little_computing_where_nothing_else_is_found():
    finding = only(run_of(interval(compute=4.0, callbacks=1.0, logging=0.2)))
    assert (finding.cause, finding.ranks) == ("low_compute", ())
    share = (4.0 + 1.0 + 0.4) / 7.2
    assert finding.numbers["share"] == pytest.approx(share)
    assert finding.gain == pytest.approx(1 - share / 0.85)
    assert "and communication take 75% of a step's time; callbacks 14%, waiting 4%" in finding.evidence
    assert "hooks" in finding.remedy


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [("data_wait", "num_workers"), ("copy", "pin_memory"), ("engine", "a larger batch"), ("callbacks", "fewer")],
)
def test_the_rest_of_a_step_says_what_to_do(phase, remedy):
    rest = dict.fromkeys(("data_wait", "copy", "engine", "callbacks"), 0.45) | {phase: 0.9}
    finding = only(run_of(interval(**rest)))
    assert finding.cause == "low_compute"
    assert remedy in finding.remedy


def test_saves_and_validation_are_no_part_of_a_step_that_computes_little():
    assert judge(run_of(changed(interval(checkpoint=5.0), num_saves=1), strategy="single")).findings == []
