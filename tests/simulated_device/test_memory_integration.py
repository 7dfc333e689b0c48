"""What waits in host memory comes back as it was, and only what was asked for is copied there."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from polyphase.engine import Engine
from polyphase.engine.devices import allocated_bytes, peak_bytes, reset_peak
from polyphase.models import ByteGPT, TokenGPT
from tests.engine.eager_graphs import eager_graphs
from tests.engine.parity import FEW_STEPS, QUIET, TOLERANCE, build, differences, loader, sgd
from tests.pairs import nightly

from . import in_a_child, install

pytestmark = [
    pytest.mark.timeout(180, func_only=True),  # to compile the device takes a minute
    # torch's compiler looks at the gradients of all that enters a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def graphs(monkeypatch):
    torch._dynamo.reset()
    return eager_graphs(monkeypatch)


def difference(flag: str, devices: int, subject: str, **flags: Any) -> float:
    return in_a_child(differences, flag, devices, subject, 3, 0.05, accelerator="sim", num_steps=FEW_STEPS, **flags)


@pytest.mark.parametrize(
    ("flag", "devices", "subject"),
    [
        # Without ties, which torch's own `module.to("sim")` loses.
        ("single", 1, "mlp"),
        ("ddp_fork", 2, "mlp"),
        ("ps_fork", 2, "mlp"),
        ("fsdp_fork", 2, "gpt, tied"),
        *nightly(("zero1_fork", 2, "mlp"), ("hsdp_fork:replicate=2,shard=2", 4, "gpt, tied")),
    ],
)
def test_activations_on_the_host(flag, devices, subject):
    assert difference(flag, devices, subject, offload="activations", make_optimizer=sgd) <= TOLERANCE


def test_activations_on_the_host_under_local_sgd():
    flags = {"make_optimizer": sgd, "accelerator": "sim", "offload": "activations", "num_steps": FEW_STEPS}
    assert in_a_child(differences, "local_sgd_fork:sync_every=1", 2, "mlp", 3, None, **flags) <= TOLERANCE


@pytest.mark.parametrize("kind", ["selective", *nightly("full")])
def test_with_activation_checkpointing(kind):
    names = ["activations", "parameters", "optimizer"]
    flags = {"offload": names, "activation_checkpointing": kind}
    assert difference("fsdp_fork", 2, "gpt, tied", **flags) <= TOLERANCE


class Counts(Callback):
    def __init__(self) -> None:
        self.at_step: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_step.append({**install().counts(), "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]})


def _copies(**flags: Any) -> dict[str, float]:
    """Copies of a step in the middle of a run, by their kinds."""
    counts = Counts()
    engine = Engine(
        accelerator="sim", devices=1, max_epochs=1, callbacks=[counts], log_every_n_steps=50, **QUIET, **flags
    )
    engine.fit(build("gpt, tied"), loader("gpt, tied", 1))
    first, last = counts.at_step[5], counts.at_step[15]
    names = ("to_host", "to_device", "to_device_pageable", "graphs")
    return {name: (last[name] - first[name]) / 10 for name in names}


def _num_saved() -> int:
    """Tensors that a step keeps for backward, but for parameters."""
    module, found = build("gpt, tied"), []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            found.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.training_step(next(iter(loader("gpt, tied", 1))), 0)
    return len(found)


def test_what_is_copied():
    none = in_a_child(_copies)
    assert none["to_host"] == 0
    every = in_a_child(_copies, offload="activations")
    assert every["to_host"] == every["to_device"] - none["to_device"] == in_a_child(_num_saved)
    assert every["to_device_pageable"] == none["to_device_pageable"]  # what comes back was pinned
    few = in_a_child(_copies, offload="activations", activation_checkpointing="full")
    assert 0 < few["to_host"] < every["to_host"] / 3


@pytest.mark.parametrize(
    ("flag", "devices", "subject"),
    [("single", 1, "mlp"), ("fsdp_fork", 2, "gpt, tied"), *nightly(("ddp_fork", 2, "mlp"))],
)
@pytest.mark.parametrize("kind", ["selective", *nightly("none", "full")])
@pytest.mark.usefixtures("graphs")
def test_compiled_steps_keep_activations_on_the_host(flag, devices, subject, kind):
    flags = {"activation_checkpointing": kind if subject != "mlp" else "none", "make_optimizer": sgd}
    assert difference(flag, devices, subject, offload="activations", compile=True, **flags) <= TOLERANCE


@pytest.mark.usefixtures("graphs")
def test_what_compiled_steps_copy():
    none = in_a_child(_copies, compile=True)
    every = in_a_child(_copies, compile=True, offload="activations")
    few = in_a_child(_copies, compile=True, offload="activations", activation_checkpointing="full")
    assert none["to_host"] == 0
    assert every["to_host"] == every["to_device"] - none["to_device"] > 3 * few["to_host"] > 0
    assert every["to_device_pageable"] == none["to_device_pageable"]
    assert none["graphs"] == every["graphs"] == few["graphs"] == 0, "hooks of saved tensors compile nothing anew"


def _peak(make: type[TokenGPT]) -> int:
    """The most memory of a step's forward and backward on 2 x 64 tokens, beyond weights and their gradients."""
    install()
    module = make(num_layers=1, dim=16, num_heads=2, context_length=64).to("sim")
    batch = torch.randint(65_536, (2, 65)).to("sim")
    for _ in range(2):  # gradients are there in the second step
        reset_peak(batch.device)
        before = allocated_bytes(batch.device)
        module._loss(batch).backward()
    return (peak_bytes(batch.device) or 0) - before


class _WithLogits(TokenGPT):
    _loss = ByteGPT._loss


def test_a_loss_in_chunks_makes_no_logits():
    logits = 2 * 64 * 65_536 * 4
    assert in_a_child(_peak, _WithLogits) > 2 * logits
    # torch's chunks: as many rows as weights have columns, here 16 of 128, beside the gradient of the weight.
    assert in_a_child(_peak, TokenGPT) < logits


def test_ends_with_the_run():
    engine = in_a_child(_left)
    assert engine == []


def _left() -> list[str]:
    engine = Engine(accelerator="sim", devices=1, max_steps=1, offload="activations", **QUIET)
    engine.fit(build("mlp"), loader("mlp", 1))
    return [name for name in vars(engine.precision_plugin) if name == "train_step_context"]
