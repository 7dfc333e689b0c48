"""`fused=True` of a user's optimizer, under every strategy: the weights of a plain loop with the same optimizer."""

import pytest
import torch
from torch import nn

from tests.pairs import nightly

from .parity import STRATEGIES, TOLERANCE, differences, suffixed

NUM_STEPS = 3
"""The second has moments, and the third those of two steps."""

COMPOSED = (
    "hsdp:replicate=2,shard=2",
    "fsdp+tp:tp=2",
    "hsdp+tp:replicate=2,tp=2",
    "pp+ddp:pipeline_size=2,microbatches=2",
    "pp+fsdp:pipeline_size=2,microbatches=2",
)
"""What these consist of, others have."""


def fused(module: nn.Module) -> torch.optim.Optimizer:
    # eps as in the parity tests: a parameter whose true gradient is zero moves by rounding noise under Adam.
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4, fused=True)


def fused_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, fused=True)


def test_a_fused_optimizer_of_replicas_that_exchange_after_each_step_equals_the_plain_loop():
    # With SGD, whose weights are linear in its gradients, and without clipping, which is by the norm on each rank.
    found = differences("local_sgd_fork:sync_every=1", 2, "mlp", 2, None, make_optimizer=fused_sgd, num_steps=NUM_STEPS)
    assert found <= TOLERANCE


@pytest.mark.parametrize("flag", [*(flag for flag in STRATEGIES if flag not in COMPOSED), *nightly(*COMPOSED)])
def test_a_fused_optimizer_equals_the_plain_loop(flag):
    flags = {"make_optimizer": fused, "num_steps": NUM_STEPS}
    found = differences(suffixed(flag, "fork"), STRATEGIES[flag], "mlp", 2, 0.05, **flags)
    assert found <= TOLERANCE
