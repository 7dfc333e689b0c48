"""A rank that is killed before the first step, or after the last one: the others end, and say which one is missing."""

import pytest

from .early import MOMENTS, early_ending, is_named
from .hooks import AFTER


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["plain", "hand"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != AFTER])
def test_the_others_end_and_name_the_one_that_is_missing(moment, strategy, launcher, tmp_path):
    found = early_ending(moment, launcher, strategy, 1, folder=tmp_path)
    print(found)
    assert found.codes == ([1, -9] if launcher == "hand" else [1]), found.output
    assert is_named(1, found.output), found.output
    assert found.num_left == 0
