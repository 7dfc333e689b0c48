"""The short form of the storm: a few kills of ranks and agents, with whole state in each process and with shards."""

import pytest

from .storm import CONFIGURATIONS, storm, undisturbed

SIZES = (60, 2)
"""Samples and epochs."""


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "seed", "points"),
    [
        ("ddp, topk, accumulation", 1, ["renamed", "load"]),
        ("fsdp", 3, ["write", "prune"]),
        ("fsdp", 5, ["start", "meet"]),
        ("zero1", 7, ["register", "connect"]),
    ],
)
def test_no_sample_is_lost_or_repeated_and_the_weights_are_those_of_a_calm_run(name, seed, points, tmp_path):
    strategy, flags = CONFIGURATIONS[name]
    undisturbed(tmp_path / "calm", strategy, *SIZES, flags=flags)
    folders = tmp_path / "stormy", tmp_path / "calm"
    outcome = storm(
        *folders, strategy, *SIZES, num_kills=4, pause_s=0.15, seed=seed, timeout_s=300, points=points, flags=flags
    )
    print(f"\n{name}: {outcome}")
    assert outcome.num_kills == 4
    assert (outcome.lost, outcome.repeated, outcome.difference, outcome.left_running) == (0, 0, 0.0, 0)
