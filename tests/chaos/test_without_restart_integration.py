"""The short form of `without_restart`: ranks killed at a few points, in drawn steps."""

import random

import pytest

from ..pairs import nightly
from .without_restart import plan, storm

POINTS = [("two at once", 0), ("recovery", 0), ("validation batch", 0)]
AT_NIGHT = [("random", 1), ("stepped", 1), ("epoch end", 1), ("validation end", 1), ("write", 1), ("renamed", 1)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "seed"), [*POINTS, *nightly(*AT_NIGHT)])
def test_runs_go_on_as_resumptions_with_the_ranks_that_are_left_would(point, seed, tmp_path):
    run = plan(point, random.Random(f"{seed} {point}"))
    verdict = storm(run, tmp_path)
    print(f"\n{run}: {verdict}")
    # Fewer than planned, if a trap has had the victim of a later one; one, if two die by one command.
    assert verdict.num_kills
    assert verdict.is_good, verdict
