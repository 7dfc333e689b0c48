"""Layers that can't be split, and sizes of layouts that are refused or derived."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.engine import Engine
from polyphase.models import ByteGPT
from tests.engine.parity import MLP, adamw, loader
from tests.engine.strategies.test_ddp_integration import QUIET

FLAGS: dict[str, Any] = {"accelerator": "cpu", **QUIET}


class Tied(LightningModule):
    """Only one of two tied layers is in the plan, or they are cut in different ways."""

    def __init__(self, plan: dict) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.plan = plan

    def tensor_parallel_plan(self) -> dict:
        return self.plan

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.b(self.a(batch[0])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"a": ColwiseParallel()}, "one of them is split and the other one is not"),
        ({"a": ColwiseParallel(), "b": RowwiseParallel()}, r"one is split as .*, the other one as"),
    ],
)
def test_tied_layers_must_be_split_alike(plan, message):
    with pytest.raises(ProcessRaisedException, match=message):
        Engine(strategy="tp_fork", devices=2, max_steps=1, **FLAGS).fit(Tied(plan), loader("mlp", 1))


class OddHeads(ByteGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=1, num_heads=3, dim=12, context_length=16)


class Convolution(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 1, 1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            OddHeads,
            r"the attention 'net\.blocks\.0\.attention' \(Attention\) has 3 heads, which 2 tensor-parallel ranks",
        ),
        (Convolution, r"no layer of Convolution .* tensor_parallel_plan\(\) that returns names and styles"),
    ],
)
def test_what_can_not_be_split_is_refused_before_any_process_starts(module, message):
    with pytest.raises(ValueError, match=message):
        Engine(strategy="tp", devices=2, max_steps=1, **FLAGS).fit(module(), loader("mlp", 1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"strategy": "tp:tp=3", "devices": 2}, r"the layout tp=3 = 3 does not fit 2 process\(es\)"),
        ({"strategy": "tp:tp=2", "devices": 4}, r"the layout tp=2 = 2 does not fit 4 process\(es\)"),
        ({"strategy": "fsdp+tp:tp=3", "devices": 4}, r"the layout tp=3 = 3 does not fit 4"),
        ({"strategy": "fsdp+tp_fork:tp=0", "devices": 4}, "the size of axis 'tp' must be a whole number of at least 1"),
        ({"strategy": "fsdp+tp", "devices": 3}, "the layout tp=2 = 2 does not fit 3"),
        ({"strategy": "hsdp+tp:tp=2,replicate=3", "devices": 8}, "replicate=3 x tp=2 = 6 does not fit 8"),
        (
            {"strategy": "tp", "devices": 2, "compression": "bf16"},
            "can't do compression 'bf16': a compression works on",
        ),
        ({"strategy": "tp", "devices": 2, "micro_batch_size": "auto", "global_batch_size": 8}, "tensor parallelism"),
        ({"strategy": "fsdp-tp:tp=2", "devices": 4}, r"Did you mean 'fsdp\+tp'"),
    ],
)
def test_flags_that_can_not_be_honoured(flags, message):
    with pytest.raises(ValueError, match=message):
        Engine(**FLAGS, **flags)


def test_sizes_that_are_left_out_are_derived():
    def layout(**flags: Any) -> str:
        return str(Engine(**FLAGS, **flags).layout)

    assert layout(strategy="tp", devices=4) == "tp=4"
    assert layout(strategy="fsdp+tp_spawn:tp=2", devices=8) == "shard=4 x tp=2"
    assert layout(strategy="hsdp+tp_fork:tp=2,shard=2", devices=8) == "replicate=2 x shard=2 x tp=2"
    assert layout(strategy="fsdp+tp", devices=4) == "shard=2 x tp=2"
    assert layout(strategy="fsdp+tp", devices=3, num_nodes=2) == "shard=2 x tp=3"
    assert layout(strategy="hsdp+tp", devices=3, num_nodes=2) == "replicate=2 x tp=3"
