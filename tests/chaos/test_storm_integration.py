"""The short form of the storm: a few kills of ranks and agents, with whole state in each process and with shards."""

import pytest

from .storm import storm, undisturbed

SIZES = (60, 2)
"""Samples and epochs."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("strategy", "seed"), [("ddp", 1), ("fsdp", 3)])
def test_no_sample_is_lost_or_repeated_and_the_weights_are_those_of_a_calm_run(strategy, seed, tmp_path):
    undisturbed(tmp_path / "calm", strategy, *SIZES)
    outcome = storm(tmp_path / "stormy", tmp_path / "calm", strategy, *SIZES, num_kills=3, seed=seed, timeout_s=300)
    print(f"\n{strategy}: {outcome}")
    assert outcome.num_kills == 3
    assert (outcome.lost, outcome.repeated, outcome.difference) == (0, 0, 0.0)
