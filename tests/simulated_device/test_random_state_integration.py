"""The random state of a process that draws on several devices."""

import torch

from polyphase.engine import Engine
from polyphase.engine.checkpoint import get_random_state, set_random_state
from polyphase.engine.strategies.dp import DP
from tests.engine.parity import QUIET, build, loader

from . import in_a_child


def _drawn() -> list[float]:
    return [float(torch.rand(1, device=f"sim:{index}")) for index in range(4)]


def _again(uses: list[int]) -> tuple[list[float], list[float]]:
    engine = Engine(strategy=DP(), accelerator="sim", devices=uses, **QUIET)
    module = build("mlp")
    module.validation_step = module.training_step
    engine.validate(module, loader("mlp", 1), verbose=False)
    state = get_random_state()
    first = _drawn()
    set_random_state(state)
    return first, _drawn()


def test_dp_keeps_the_state_of_all_its_devices():
    first, second = in_a_child(_again, [0, 1, 2])
    assert first[:3] == second[:3]
    assert first[3] != second[3]  # is none of its own
