"""Seeds out of other numbers."""

import itertools

import pytest

from polyphase.engine.checkpoint.rng import derive_seed


@pytest.mark.parametrize(
    ("numbers", "seed"),
    [((0, 0), 765232833172254823), ((1, 2), 5673316911369133891), ((7, 3), 8082331787402686543)],
)
def test_they_are_the_same_in_all_processes_and_versions(numbers, seed):
    assert derive_seed(*numbers) == seed


def test_neighbours_have_nothing_in_common():
    seeds = {derive_seed(*pair) for pair in itertools.product(range(40), repeat=2)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
