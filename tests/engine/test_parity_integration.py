"""The same weights under every strategy as in a plain loop: the heart of it all."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from polyphase.engine import Engine
from tests.pairs import alternating, nightly

from .parity import (
    ALL_SUBJECTS,
    FEW_STEPS,
    QUIET,
    STEPS,
    SUBJECTS,
    TOLERANCE,
    build,
    differences,
    largest_difference,
    loader,
    sgd,
    suffixed,
)

STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "fsdp": 2, "hsdp:replicate=2,shard=2": 4, "ps": 2}
"""World size by flag; the launcher's suffix is added by the test."""

SPLIT = {"tp": 2, "fsdp+tp:tp=2": 4}
"""The same, where layers are split."""

SEQUENCES = {
    "cp": 2,
    "ddp+cp": 4,
    "fsdp+cp": 4,
    "hsdp+cp:replicate=2,cp=2": 4,
    "cp:attention=ring": 2,
    "fsdp+cp:attention=ring": 4,
}
"""The same, where sequences are split."""

# BatchNorm would see micro-batches, so the digits are left out.
PIPELINES = {
    "pp:microbatches=4": 2,
    "pp:microbatches=4,schedule=gpipe": 2,
    "pp:microbatches=4,schedule=interleaved": 2,
    "pp:microbatches=4,schedule=zero-bubble": 2,
    "pp+ddp:pipeline_size=2,microbatches=2": 4,
    "pp+fsdp:pipeline_size=2,microbatches=2": 4,
}
THREE_AXES = "hsdp+tp:replicate=2,shard=2,tp=2"
EACH_STEP = "local_sgd:sync_every=1"
"""An exchange after each step, of which SGD makes what it makes of averaged gradients."""
FLAGS = (*STRATEGIES, *PIPELINES, *SPLIT, *SEQUENCES, THREE_AXES, EACH_STEP)
"""All that is compared here; `test_registered.py` misses a strategy that is not."""
WAYS = ((1, None), (3, 0.05), (1, 0.05), (3, None))
"""Accumulation and clipping. Each cell has one in `make test`; each flag has all of them, or two opposites."""
MATRIX = [
    (flag, subject, (number * (1 if len(subjects) == len(WAYS) else 2) + index) % len(WAYS))
    for flags, subjects in (
        (STRATEGIES, SUBJECTS),
        (PIPELINES, ["mlp", "gpt of four blocks, tied"]),
        (SPLIT, ["mlp", "gpt, tied"]),  # of convolutions no plan is derived
        (SEQUENCES, ["gpt, tied"]),
    )
    for number, flag in enumerate(flags)
    for index, subject in enumerate(subjects)
]

_HSDP = "hsdp:replicate=2,shard=2"
OF_OTHERS = {
    *((flag, "mlp") for flag in (_HSDP, *list(PIPELINES)[1:], "fsdp+tp:tp=2")),
    ("hsdp+cp:replicate=2,cp=2", "gpt, tied"),
    *((_HSDP, f"digits, BatchNorm {statistics}") for statistics in ("frozen", "synced")),
}
"""Subjects that `make test` leaves to strategies that these consist of, or to another schedule."""


def _is_kept(flag: str, subject: str, way: int, kept: int, num_steps: int) -> bool:
    return way == kept and num_steps == FEW_STEPS and (flag, subject) not in OF_OTHERS


CASES = [
    pytest.param(
        flag,
        subject,
        accumulate,
        clip,
        num_steps,
        id=f"{flag}-{subject}-{accumulate}-{'no clip' if clip is None else 'clip'}-{num_steps} steps",
        marks=[] if _is_kept(flag, subject, way, kept, num_steps) else pytest.mark.nightly,
    )
    for flag, subject, kept in MATRIX
    for way, (accumulate, clip) in enumerate(WAYS)
    for num_steps in ((FEW_STEPS, STEPS) if accumulate == 1 else (FEW_STEPS,))
]

# A gradient that float32 rounds differently may be rounded to another bfloat16, 1/256 away, of which AdamW at 1e-3
# makes a step that is up to 4e-6 longer (seen: 6e-6 after all of them, and 0 under ddp).
BF16_TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def table() -> Iterator[dict]:
    """Collects the differences, and prints them when all are there."""
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    yield rows
    print("\n\nlargest |difference| of any weight from a plain loop")
    print(f"{'':40}" + "".join(f"{subject:>26}" for subject in ALL_SUBJECTS))
    for flag, row in rows.items():
        found = (f"{row[subject]:.1e}" if subject in row else "" for subject in ALL_SUBJECTS)
        print(f"{flag:40}" + "".join(f"{difference:>26}" for difference in found))


@pytest.mark.parametrize(("flag", "subject", "accumulate", "clip", "num_steps"), CASES)
def test_equals_a_plain_loop(flag, subject, accumulate, clip, num_steps, table):
    # By fork, which spares the imports; another test is the same by spawn, as Lightning's users have it.
    devices = (STRATEGIES | PIPELINES | SPLIT | SEQUENCES)[flag]
    # Two shuffled epochs, whose orders are drawn from torch's own generator: nothing else may draw from it.
    flags = {"num_steps": num_steps // 2, "num_epochs": 2}
    difference = differences(suffixed(flag, "fork"), devices, subject, accumulate, clip, **flags)
    table[flag][subject] = max(table[flag][subject], difference)
    assert difference <= TOLERANCE


@pytest.mark.parametrize(("subject", "num_steps"), [("mlp", FEW_STEPS // 2), *nightly(("gpt, tied", STEPS))])
def test_equals_a_plain_loop_on_a_mesh_of_three_axes(subject, num_steps, table):
    flag = suffixed(THREE_AXES, "fork")
    table[flag][subject] = differences(flag, 8, subject, 1, 0.05, num_steps=num_steps)
    assert table[flag][subject] <= TOLERANCE


# Synced BatchNorm is left out: its statistics are those of all ranks, the reference takes theirs one after the other.
ALL_IN_BF16 = [
    (flag, 2, subject, *way)
    for flag in ("ddp_fork", "fsdp_fork", "hsdp_fork:replicate=2,shard=2")
    for subject in SUBJECTS
    for way in ((1, None), (3, 0.05))
    if "synced" not in subject
]
IN_BF16 = [ALL_IN_BF16[number] for number in (1, 4, 8, 11, 12)]
"""Each strategy, each subject, and each way of accumulating and clipping."""


@pytest.mark.parametrize(
    ("flag", "replicas", "subject", "accumulate", "clip", "num_steps"),
    [*((*cell, FEW_STEPS) for cell in IN_BF16), *nightly(*((*cell, STEPS) for cell in ALL_IN_BF16))],
)
def test_equals_a_plain_loop_that_averages_in_bf16(flag, replicas, subject, accumulate, clip, num_steps, table):
    devices = 4 if flag.startswith("hsdp") else 2
    flags = {"in_bf16": (devices, replicas), "compression": "bf16", "num_steps": num_steps}
    difference = differences(flag, devices, subject, accumulate, clip, **flags)
    table[f"{flag} bf16"][subject] = max(table[f"{flag} bf16"][subject], difference)
    assert difference <= BF16_TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("flag", STRATEGIES | PIPELINES | SPLIT)
def test_three_shuffled_epochs_equal_those_of_a_plain_loop(flag):
    devices, name = (STRATEGIES | PIPELINES | SPLIT)[flag], suffixed(flag, "fork")
    assert differences(name, devices, "gpt of four blocks, tied", 1, None, num_steps=3, num_epochs=3) <= TOLERANCE


@pytest.mark.parametrize("num_steps", [FEW_STEPS, *nightly(STEPS)])
@pytest.mark.parametrize(("subject", "accumulate"), alternating(SUBJECTS, [1, 3]))
def test_local_sgd_with_an_exchange_after_each_step_equals_a_plain_loop(subject, accumulate, num_steps, table):
    # With SGD, whose weights are linear in its gradients, and without clipping, which is by the norm on each rank.
    flag = suffixed(EACH_STEP, "fork")
    difference = differences(flag, 2, subject, accumulate, None, make_optimizer=sgd, num_steps=num_steps)
    table[flag][subject] = max(table[flag][subject], difference)
    assert difference <= TOLERANCE


@pytest.mark.usefixtures("warm_workers")
# Every strategy, and every subject: what they compute is that of the forks, what differs is how they get there.
@pytest.mark.parametrize(
    ("flag", "subject"),
    [
        ("ddp", "mlp"),
        ("fsdp", "gpt, tied"),
        *(pytest.param("ddp", subject, marks=pytest.mark.nightly) for subject in SUBJECTS if subject != "mlp"),
        *(
            pytest.param(flag, "gpt, tied", marks=pytest.mark.nightly)
            for flag in STRATEGIES
            if flag not in ("single", "ddp", "fsdp")
        ),
    ],
)
def test_equals_a_plain_loop_by_spawn(flag, subject, table):
    if subject == "mlp":
        accumulate, clip = 1, None
    else:
        accumulate, clip = 3, 0.05
    name = suffixed(flag, "spawn")
    table[name][subject] = differences(name, STRATEGIES[flag], subject, accumulate, clip, num_steps=FEW_STEPS)
    assert table[name][subject] <= TOLERANCE


@pytest.mark.parametrize(
    "flag",
    [
        "ddp_fork:static_graph=true",
        "ddp_fork:gradient_as_bucket_view=false,bucket_cap_mb=0.01",
        "fsdp_fork:no_sync=false",
        "hsdp_fork:replicate=2,no_sync=false",
        "pp_fork:microbatches=8",
        # The first has a test of its own, the next two are in the next test, and one replica or micro-batch is none.
        *nightly(
            "ddp_fork:find_unused_parameters=true",
            "fsdp_fork:reshard_after_forward=false",
            "fsdp_fork:activation_checkpointing=true",
            "hsdp_fork:replicate=1",
            "pp_fork:microbatches=1,schedule=gpipe",
        ),
    ],
)
def test_options_change_the_cost_and_not_the_result(flag):
    has_blocks = flag.startswith(("ddp", "pp")) or "checkpointing" in flag
    subject = "gpt, tied" if has_blocks else "mlp"
    assert differences(flag, 2, subject, 3, 0.05, num_steps=FEW_STEPS) <= TOLERANCE


@pytest.mark.parametrize(
    "flag",
    [
        "fsdp_fork:units=blocks",
        "fsdp_fork:units=module",
        "fsdp_fork:no_sync=false,extra_overlap=true",
        "fsdp_fork:reshard_after_forward=false",
        *nightly("fsdp_fork", "fsdp_fork:extra_overlap=true", "fsdp_fork:activation_checkpointing=true"),
    ],
)
def test_units_beside_the_blocks(flag):
    assert differences(flag, 2, "wide vocabulary", 3, 0.05, num_steps=FEW_STEPS) <= TOLERANCE


@pytest.mark.nightly
def test_units_beside_the_blocks_of_replicas():
    flag = "hsdp_fork:replicate=2,extra_overlap=true"
    assert differences(flag, 4, "wide vocabulary", 3, 0.05, num_steps=FEW_STEPS) <= TOLERANCE


@pytest.mark.parametrize("flag", ["pp_fork", *nightly("pp_fork:schedule=zero-bubble")])
def test_three_stages(flag):
    assert differences(flag, 3, "gpt of four blocks, tied", 3, 0.05, num_steps=FEW_STEPS) <= TOLERANCE


@pytest.mark.parametrize("flag", ["ddp_fork", "fsdp_fork"])
def test_clipping_by_value(flag):
    whole = build("mlp")
    Engine(accelerator="cpu", max_epochs=1, gradient_clip_val=1e-3, gradient_clip_algorithm="value", **QUIET).fit(
        whole, loader("mlp", 1)
    )
    module = build("mlp")
    Engine(
        strategy=flag,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        gradient_clip_val=1e-3,
        gradient_clip_algorithm="value",
        **QUIET,
    ).fit(module, loader("mlp", 1, 2))
    assert largest_difference(module.state_dict(), whole.state_dict()) <= TOLERANCE
