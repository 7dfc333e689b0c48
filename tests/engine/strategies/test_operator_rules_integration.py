"""Operators that torch's DTensor computes otherwise than for a whole tensor: right under our rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from polyphase.engine.strategies.fsdp.written_parameters import give_back_numbers, read_whole_numbers
from polyphase.engine.strategies.operator_rules import install_operator_rules
from polyphase.engine.strategies.whole_steps import plain_as_replicas
from tests.distributed import run_ranks

SHAPE = (4, 7, 8)
"""Two ranks have unequal parts of the second dim."""
TARGET = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
CLASSES = torch.arange(28) % 8


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "running sums": lambda x: x.cumsum(-1),
    "running sums over another dim": lambda x: x.cumsum(-2),
    "running products": lambda x: x.cumprod(-1),
    "running logarithms": lambda x: x.logcumsumexp(-1),
    "whether any": lambda x: x * (x > 1).any(-1, keepdim=True),
    "how often any": lambda x: x * (x > 1).any(-1).sum(),
    "whether any sum": lambda x: x * x.detach().sum(-1, keepdim=True).bool().any(),
    "a sum of norms": lambda x: x.norm(dim=-1).sum(),
    "sums of norms": lambda x: x.norm(dim=-2).sum(-1).square(),
    "a sum of roots": lambda x: torch.linalg.vector_norm(x, 3, dim=-1).sum(),
    "a sum as a number": lambda x: x * x.detach().sum().item(),
    "a maximum as a number": lambda x: x / float(x.detach().abs().max()),
    "a number that is written into a sum": lambda x: (x.sum(-1) * 1).fill_(2.0) + x.sum(-1),
    "a choice by a sum": lambda x: x * (2 if x.detach().sum() > 0 else 3),
    "squared error": lambda x: functional.mse_loss(x, TARGET),
    "smooth error": lambda x: functional.smooth_l1_loss(x, TARGET),
    "huber": lambda x: functional.huber_loss(x, TARGET),
    "binary": lambda x: functional.binary_cross_entropy(x.sigmoid(), TARGET.sigmoid()),
    "binary, weighted": lambda x: functional.binary_cross_entropy_with_logits(
        x, TARGET.sigmoid(), weight=TARGET.abs(), pos_weight=TARGET[0, 0].abs()
    ),
    "binary of each": lambda x: functional.binary_cross_entropy_with_logits(x, TARGET.sigmoid(), reduction="none"),
    "soft margin": lambda x: functional.soft_margin_loss(x, TARGET.sign()),
    "cross entropy of some": lambda x: functional.cross_entropy(x.flatten(0, 1), CLASSES, ignore_index=2),
}


def _compared(rank: int, dim: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    install_operator_rules()
    read_whole_numbers(None)
    wrong = []
    with plain_as_replicas():
        for name, function in FUNCTIONS.items():
            whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).requires_grad_()
            expected = function(whole)
            weights = torch.linspace(1, 2, expected.numel()).view(expected.shape)
            (expected * weights).sum().backward()
            split: Any = distribute_tensor(whole.detach(), mesh, [Shard(dim)]).requires_grad_()
            value: Any = function(split)
            (value * weights).sum().backward()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if not torch.allclose(value, expected) or not torch.allclose(split.grad.full_tensor(), whole.grad):
                wrong.append(name)
            dist.barrier()
    give_back_numbers()
    (folder / str(rank)).write_text(repr(wrong))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_operators_on_a_split_tensor_are_those_on_the_whole(dim, tmp_path):
    run_ranks(_compared, 2, dim, tmp_path, start_method="fork", timeout_s=100)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[]", "[]"]
