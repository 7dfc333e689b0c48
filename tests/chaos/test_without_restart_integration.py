"""The short form of `without_restart`: ranks killed at a few points, in drawn steps."""

import random
from pathlib import Path

import pytest

from ..pairs import nightly
from .without_restart import Plan, plan, storm

POINTS = [("two at once", 0), ("recovery", 0), ("order", 0), ("validation batch", 0)]
AT_NIGHT = [("random", 1), ("stepped", 1), ("epoch end", 1), ("validation end", 1), ("write", 1), ("renamed", 1)]
RETURNING = [("two at once", "fsdp")]
RETURNING_AT_NIGHT = [
    ("recovery", "zero1"),
    ("random", "fsdp"),
    ("backward", "hsdp"),
    ("write", "fsdp"),
    ("stepped", "zero1"),
    ("validation batch", "hsdp"),
    ("epoch end", "fsdp"),
]
APART = [("stepped", "local_sgd"), ("validation batch", "diloco"), ("random", "diloco beside training")]
APART_AT_NIGHT = [
    ("random", "diloco"),
    ("backward", "local_sgd"),
    ("two at once", "diloco"),
    ("order", "local_sgd"),
    ("save", "local_sgd"),
    ("stepped", "diloco beside training"),
    ("recovery", "diloco beside training"),
    ("save", "diloco beside training"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "seed"), [*POINTS, *nightly(*AT_NIGHT)])
def test_runs_go_on_as_resumptions_with_the_ranks_that_are_left_would(point, seed, tmp_path):
    _is_as_expected(plan(point, random.Random(f"{seed} {point}")), tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "strategy"), [*RETURNING, *nightly(*RETURNING_AT_NIGHT)])
def test_and_where_ranks_go_back_to_a_snapshot(point, strategy, tmp_path):
    _is_as_expected(plan(point, random.Random(f"0 {point} {strategy}"), strategy), tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "strategy"), [*APART, *nightly(*APART_AT_NIGHT)])
def test_and_where_ranks_step_apart_as_a_loop_by_hand_would(point, strategy, tmp_path):
    _is_as_expected(plan(point, random.Random(f"0 {point} {strategy}"), strategy), tmp_path)


def _is_as_expected(run: Plan, folder: Path) -> None:
    verdict = storm(run, folder)
    print(f"\n{run}: {verdict}")
    # Fewer than planned, if a trap has had the victim of a later one; one, if two die by one command.
    assert verdict.num_kills
    assert verdict.is_good, verdict
