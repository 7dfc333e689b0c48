"""A rank that is killed before the first step, or in the first save: the other one ends, and says which is missing."""

import pytest

from .early import MOMENTS, early_ending, is_named


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
@pytest.mark.parametrize("moment", MOMENTS[: MOMENTS.index("on_fit_end")])
def test_the_other_rank_ends_and_names_the_one_that_is_missing(moment, strategy, tmp_path):
    """Ranks that were started by hand: no launcher looks at them. After the last step, nobody waits for the other."""
    found = early_ending(moment, "hand", strategy, 1, folder=tmp_path)
    print(found)
    assert found.codes == [1, -9], found.output
    assert is_named(1, found.output), found.output
    assert found.num_left == 0
