"""Blocks that compute their activations again in backward train to the same weights, under every strategy."""

import pytest
import torch
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.models import ByteGPT
from tests.pairs import nightly

from .parity import MICRO_BATCH, QUIET, SUBJECTS, TOLERANCE, adamw, differences, largest_difference, sgd

STRATEGIES = {
    "single": 1,
    "ddp_fork": 2,
    "zero1_fork": 2,
    "fsdp_fork": 2,
    "hsdp_fork:replicate=2,shard=2": 4,
    "tp_fork:sequence_parallel=true": 2,
    "cp_fork": 2,
    "fsdp+tp_fork:tp=2": 4,
    "ps_fork": 2,
    "hsdp+tp_fork:replicate=2,tp=2": 4,
}
PIPELINES = {
    "pp_fork:microbatches=4": 2,
    "pp_fork:microbatches=4,schedule=interleaved": 2,
    "pp_fork:microbatches=4,schedule=zero-bubble": 2,
    "pp+fsdp_fork:pipeline_size=2,microbatches=2": 4,
    "pp+ddp_fork:pipeline_size=2,microbatches=2": 4,
}
SLOW = ("tp_fork:sequence_parallel=true", "cp_fork", "fsdp+tp_fork:tp=2", "hsdp+tp_fork:replicate=2,tp=2")
"""Seconds for each forward and backward of a few blocks; that a step has several, the others show."""
NUM_STEPS = 2
"""The second is from weights that the first has changed."""
COMBINED = (
    "zero1_fork",
    "hsdp_fork:replicate=2,shard=2",
    "fsdp+tp_fork:tp=2",
    "hsdp+tp_fork:replicate=2,tp=2",
    "pp_fork:microbatches=4,schedule=interleaved",
    "pp+fsdp_fork:pipeline_size=2,microbatches=2",
    "pp+ddp_fork:pipeline_size=2,microbatches=2",
)
"""Others have their parts: these compute the blocks again in the same way."""
CELLS = [
    # Each strategy with one of the two, and each of the two with half of the strategies; combinations are nightly.
    pytest.param(flag, kind, marks=pytest.mark.nightly if number % 2 == (kind == "full") or flag in COMBINED else ())
    for kind in ("full", "selective")
    for number, flag in enumerate(STRATEGIES | PIPELINES)
    if kind == "full" or "zero-bubble" not in flag  # which refuses the other
]


@pytest.mark.parametrize(("flag", "kind"), CELLS)
def test_equals_a_plain_loop(flag, kind):
    subject = "gpt of four blocks, tied" if flag in PIPELINES else "gpt, tied"
    devices = (STRATEGIES | PIPELINES)[flag]
    accumulate = 1 if flag in SLOW else 3
    flags = {"num_steps": NUM_STEPS, "activation_checkpointing": kind}
    assert differences(flag, devices, subject, accumulate, 0.05, **flags) <= TOLERANCE


@pytest.mark.parametrize("kind", ["selective", *nightly("full")])
def test_local_sgd_equals_a_plain_loop(kind):
    flag = "local_sgd_fork:sync_every=1"
    flags = {"num_steps": NUM_STEPS, "activation_checkpointing": kind}
    difference = differences(flag, 2, "gpt, tied", 3, None, make_optimizer=sgd, **flags)
    assert difference <= TOLERANCE


class ByHand(ByteGPT):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for _ in range(2):  # the second step's forward is with other weights
            self.optimizers().zero_grad()
            self.manual_backward(self._loss(batch))
            self.optimizers().step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.mark.parametrize("kind", ["full", *nightly("selective")])
def test_a_module_that_optimizes_by_hand(kind):
    states = []
    for flag, each in (("single", "none"), ("fsdp_fork", kind)):
        torch.manual_seed(1)
        module = ByHand(num_layers=2, num_heads=2, dim=16, context_length=16).train()
        devices = 1 if flag == "single" else 2
        flags = {"strategy": flag, "devices": devices, "activation_checkpointing": each}
        data = DataLoader(SUBJECTS["gpt, tied"].data(NUM_STEPS * MICRO_BATCH), batch_size=MICRO_BATCH // devices)
        Engine(accelerator="cpu", max_epochs=1, **flags, **QUIET).fit(module, data)
        states.append(module.state_dict())
    assert largest_difference(*states) <= TOLERANCE


class Drops(ByteGPT):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def trained(flag: str, kind: str, precision: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    module = Drops(num_layers=2, num_heads=2, dim=16, context_length=16, dropout=0.2).train()
    engine = Engine(
        strategy=flag,
        accelerator="cpu",
        devices=2,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        precision=precision,
        activation_checkpointing=kind,
        check_first_steps=False,
        **QUIET,
    )
    data = SUBJECTS["gpt, tied"].data(2 * NUM_STEPS * MICRO_BATCH)
    engine.fit(module, DataLoader(data, batch_size=MICRO_BATCH // engine.data_size))
    return module.state_dict()


@pytest.mark.parametrize(
    ("flag", "precision"),
    [
        pytest.param(
            flag,
            precision,
            marks=()
            if (flag, precision) in (("fsdp_fork", "32-true"), ("pp_fork:microbatches=2", "bf16-mixed"))
            else pytest.mark.nightly,
        )
        for precision in ("32-true", "bf16-mixed")
        for number, flag in enumerate(["ddp_fork", "tp_fork", "fsdp_fork", "pp_fork:microbatches=2"])
    ],
)
def test_dropout_drops_the_same_again(flag, precision):
    # What each rank drops is its own: the reference is the same strategy, to the bit.
    expected = trained(flag, "none", precision)
    for kind in ("full", "selective"):
        assert largest_difference(trained(flag, kind, precision), expected) == 0
