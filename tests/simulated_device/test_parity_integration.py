"""On a device that raises where CUDA raises, every strategy computes what a plain loop on the CPU does."""

from typing import Any

import pytest

from tests.engine.parity import FEW_STEPS, STRATEGIES, TOLERANCE, adamw, differences, sgd, suffixed
from tests.pairs import alternating, nightly

from . import in_a_child

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute

COMBINED = [
    "fsdp+tp:tp=2",
    "hsdp+tp:replicate=2,tp=2",
    "pp+ddp:pipeline_size=2,microbatches=2",
    "pp+fsdp:pipeline_size=2,microbatches=2",
]
"""Nightly: their parts are there by themselves, and test_costs_integration.py trains under such ones."""
WAYS = [(1, None), (3, 0.05)]
"""Accumulation and clipping."""


def difference(flag: str, *arguments: Any, **options: Any) -> float:
    options = {"accelerator": "sim", "num_steps": FEW_STEPS, **options}
    return in_a_child(differences, suffixed(flag, "fork"), STRATEGIES[flag], *arguments, **options)


@pytest.mark.parametrize(
    ("flag", "accumulate", "clip"),
    [
        *alternating([flag for flag in STRATEGIES if flag not in COMBINED], WAYS),
        *nightly(*((flag, *way) for flag in COMBINED for way in WAYS)),
    ],
)
def test_equals_a_plain_loop(flag, accumulate, clip):
    # Adam divides a wrong factor away, as of a clipped gradient; SGD does not.
    optimizer = adamw if clip is None else sgd
    assert difference(flag, "knows its device", accumulate, clip, make_optimizer=optimizer) <= TOLERANCE


@pytest.mark.parametrize("flag", ["fsdp", *nightly("hsdp:replicate=2,shard=2")])
@pytest.mark.parametrize(("accumulate", "clip"), [WAYS[1], *nightly(WAYS[0])])
def test_offloaded_parameters_equal_a_plain_loop(flag, accumulate, clip):
    options = {"make_optimizer": adamw if clip is None else sgd, "offload": "parameters"}
    assert difference(flag, "knows its device", accumulate, clip, **options) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [3, *nightly(1)])
def test_local_sgd_with_an_exchange_after_each_step_equals_a_plain_loop(accumulate):
    # With SGD, whose weights are linear in its gradients.
    arguments = ("local_sgd_fork:sync_every=1", 2, "knows its device", accumulate, None)
    assert in_a_child(differences, *arguments, make_optimizer=sgd, accelerator="sim", num_steps=FEW_STEPS) <= TOLERANCE


@pytest.mark.parametrize("flag", ["fsdp:extra_overlap=true", *nightly("hsdp:replicate=2,shard=2,extra_overlap=true")])
def test_units_beside_the_blocks(flag):
    number = 4 if flag.startswith("hsdp") else 2
    found = in_a_child(
        differences, suffixed(flag, "fork"), number, "wide vocabulary", 3, 0.05, accelerator="sim", num_steps=FEW_STEPS
    )
    assert found <= TOLERANCE


@pytest.mark.parametrize("flag", ["fsdp", "pp:microbatches=4"])
def test_a_language_model_with_tied_weights_equals_a_plain_loop(flag):
    assert difference(flag, "gpt of four blocks, tied", 1, 0.05) <= TOLERANCE
