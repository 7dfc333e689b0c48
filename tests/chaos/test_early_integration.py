"""A rank that is killed before the first step, in the first save, or when all steps are done: the other one ends with
an error, and says which is missing."""

import pytest

from .early import MOMENTS, early_ending, is_named


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
@pytest.mark.parametrize("moment", MOMENTS[:-1])
def test_the_other_rank_ends_and_names_the_one_that_is_missing(moment, strategy, tmp_path):
    """Ranks that were started by hand: no launcher looks at them."""
    _check(moment, strategy, 1, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_after_the_run_is_named(victim, tmp_path):
    _check(MOMENTS[-1], "ddp", victim, tmp_path)


def _check(moment, strategy, victim, folder):
    end = early_ending(moment, "hand", strategy, victim, folder=folder)
    print(end)
    assert end.codes == ([-9, 1] if victim == 0 else [1, -9]), end.output
    assert is_named(victim, end.output), end.output
    assert end.num_left == 0
