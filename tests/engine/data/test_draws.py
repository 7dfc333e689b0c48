"""A few of the random draws of `draws.py`, which makes 1,000 of them at night."""

from dataclasses import replace

import pytest
from lightning.pytorch import Trainer, seed_everything

from tests.engine.tiny import QUIET
from tests.pairs import nightly

from .draw_checks import plain
from .draw_runs import SEED
from .draw_spec import STOPS, Draw, draw
from .draws import in_one_process, on_ranks, wrong_on_ranks
from .kinds import COMBINED, KINDS, ids_of, load
from .runs import Trains


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # taken back after the test


@pytest.mark.parametrize("num_draws", [12, *nightly(25)])
def test_runs_are_trained_on_the_samples_of_a_plain_loop(num_draws, tmp_path):
    numbers = [number for number in range(100) if not workers(number)][:num_draws]
    assert in_one_process(0, numbers, tmp_path) == {}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_draws", [1, *nightly(2)])
def test_two_ranks_are_too(num_draws, tmp_path):
    numbers = [number for number in range(100) if num_ranks(number) == (2, 2) and not workers(number)][:num_draws]
    assert on_ranks(0, numbers, 2, tmp_path, timeout_s=60) == {}


_TWO_RANKS = Draw(
    kind="shuffle",
    num_samples=3,
    batch_size=1,
    drop_last=False,
    structure="tensor",
    num_workers=0,
    persistent=False,
    accumulate=1,
    limit=None,
    stop="save",
    stop_after=1,
    num_ranks=2,
    later_batch_size=1,
    later_num_workers=0,
    later_num_ranks=2,
)
FOUND = {
    "a run goes on with a batch for which a rank has no sample": replace(_TWO_RANKS, stop="should_stop", stop_after=3),
    "one rank was through with its stream": replace(_TWO_RANKS, kind="stream with shard", stop_after=2),
    "workers ask for an order before the saved random state is set": replace(
        _TWO_RANKS,
        kind="weighted",
        num_samples=8,
        accumulate=2,
        stop="should_stop",
        stop_after=5,
        later_num_workers=1,
    ),
    "an epoch was over before the samples that drop_last leaves out": replace(
        _TWO_RANKS, kind="shuffle, own generator", num_samples=5, drop_last=True, stop_after=4
    ),
}
"""Draws that were wrong, made small."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("what", FOUND.values(), ids=FOUND)
def test_what_was_wrong_once(what, tmp_path):
    assert wrong_on_ranks(what, tmp_path / "0", timeout_s=60) is None


@pytest.mark.parametrize("num_samples", [4, 9])
@pytest.mark.parametrize("kind", sorted(COMBINED - {"CombinedLoader, sequential"}))
def test_the_plain_loop_is_stock_lightnings(kind, num_samples):
    """Also where both loaders have one batch, and a loop that asks for the end draws an order more than Lightning."""
    what = replace(_TWO_RANKS, kind=kind, num_samples=num_samples, batch_size=5, num_ranks=1, later_num_ranks=1)
    seed_everything(SEED, verbose=False)
    module = Trains()
    Trainer(**{**QUIET, "devices": 1, "max_epochs": 3}).fit(module, load(what, 0, 1))
    found = [[ids_of(batch) for number, _, batch in module.seen if number == epoch] for epoch in range(3)]
    assert found == plain(what, 3)


def test_the_draws_have_every_kind_and_stop():
    draws = [draw(0, number, 4) for number in range(1000)]
    assert {what.kind for what in draws} == set(KINDS)
    assert {what.stop for what in draws} == set(STOPS)
    assert {(what.num_ranks, what.later_num_ranks) for what in draws} == {
        (i, k) for i in range(1, 5) for k in range(1, 5)
    }


def workers(number: int) -> int:
    what = draw(0, number)
    return what.num_workers + what.later_num_workers


def num_ranks(number: int) -> tuple[int, int]:
    what = draw(0, number, 2)
    return what.num_ranks, what.later_num_ranks
