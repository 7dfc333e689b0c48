"""The simulation of runs that lose ranks agrees with closed forms."""

import pytest

from benchmarks.goodput import POLICIES, Costs, best_interval, closed_form, simulate, young

COSTS = Costs(mtbf_s=4000.0, save_s=10.0, notice_s=20.0, restart_s=80.0)


@pytest.mark.parametrize("interval_s", [60.0, 280.0, 1500.0])
def test_goodput_with_restarts_is_dalys(interval_s):
    found = simulate(COSTS, "restart", interval_s, num_failures=20_000)
    # Of 20,000 failures the mean cost has a standard error of less than 1 %.
    assert 1 - found.goodput == pytest.approx(1 - closed_form(COSTS, interval_s), rel=0.03)


def test_the_best_interval_is_youngs():
    best_s = best_interval(COSTS, "restart")
    assert 0.6 < best_s / young(COSTS) < 1.6
    assert closed_form(COSTS, best_s) == pytest.approx(closed_form(COSTS, young(COSTS)), abs=0.005)


def test_if_each_failure_ends_the_run_policies_are_the_same():
    fatal = Costs(mtbf_s=4000.0, save_s=10.0, fatal=1.0)
    first, *others = (simulate(fatal, policy, 280.0, num_failures=300) for policy in POLICIES)
    assert all(vars(other) == vars(first) for other in others)


def test_without_costs_only_absent_ranks_are_lost():
    free = Costs(mtbf_s=1000.0, fatal=0.0, width=0.001, save_s=0.0, notice_s=0.0, regroup_s=0.0)
    outcome = simulate(free, "go on", 100.0, num_failures=101)
    # 0 to 100 ranks of 1,000 are away, one more after each failure.
    assert 1 - outcome.goodput == pytest.approx(0.05, rel=0.2)
    assert outcome.wall_s == pytest.approx(outcome.useful_s + outcome.absent_s)
    assert outcome.again_s == outcome.saves_s == 0.0
