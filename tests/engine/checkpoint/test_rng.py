"""The random numbers after a checkpoint are those that would have been drawn."""

import io
import random
import traceback

import numpy as np
import pytest
import torch

from polyphase.engine.checkpoint import get_random_state, set_random_state
from polyphase.engine.checkpoint.rng import derive_seed, seed_all


def draw() -> list[float]:
    return [
        *(random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())),
        *(float(torch.rand(())), float(torch.randn(()))),
    ]


@pytest.mark.parametrize("num_before", range(4))
def test_the_same_numbers_are_drawn_again(num_before):
    # Gaussians come in pairs: after an odd number of them, one is kept for the next call.
    for _ in range(num_before):
        draw()
    stream = io.BytesIO()
    torch.save(get_random_state(), stream)
    expected = [draw() for _ in range(3)]
    stream.seek(0)
    set_random_state(torch.load(stream, weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_asking_draws_nothing():
    state = get_random_state()
    expected = draw()
    set_random_state(state)
    get_random_state()
    assert draw() == expected


@pytest.mark.parametrize(
    "draws", [[np.random.rand], [np.random.normal], [np.random.normal] * 2, [dict], [np.random.seed]]
)
def test_numpys_state_is_read_again_where_something_was_drawn(draws):
    np.random.seed(5)
    np.random.normal()  # keeps a second number
    get_random_state()
    for draw in draws:
        draw()
        name, keys, *rest = np.random.get_state(legacy=True)
        assert get_random_state()["numpy"] == [name, keys.tolist(), *rest]


def test_a_seed_is_that_of_torch():
    torch.manual_seed(derive_seed(3, 5))
    expected = torch.rand(4)
    seed_all(3, 5)
    assert torch.equal(torch.rand(4), expected)


def test_seeding_walks_no_stack_where_there_is_no_device(monkeypatch):
    """torch notes a stack for each kind of device that might come, which takes longer than a small micro-batch."""
    if torch.accelerator.is_available():
        pytest.skip("torch seeds the device, and walks no stack")
    walks = []
    monkeypatch.setattr(traceback, "format_stack", lambda *_, **__: walks.append(1) or [])
    torch.manual_seed(1)
    assert walks, "torch no longer does: seed by torch.manual_seed alone"
    del walks[:]
    seed_all(1)
    assert not walks
