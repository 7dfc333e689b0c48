"""The user's own collectives, where ranks have the same samples: right, or refused by line."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn.functional import mse_loss

from tests.pairs import nightly
from tests.zoo.model import Model, Zoo
from tests.zoo.run import run

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Centred(Zoo):
    """Its outputs are centred by `mean`, that of all ranks in the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        z = self.head(x).mean(1)
        mean = self.mean(z.sum(0), len(z)) if dist.is_initialized() else z.sum(0) / len(z)
        return mse_loss(z - mean.detach(), y)

    def mean(self, total: Tensor, number: int) -> Tensor:
        raise NotImplementedError


class Sums(Centred):
    def mean(self, total, number):
        count = torch.tensor(float(number))
        total = total.detach().clone()
        dist.all_reduce(total)
        dist.all_reduce(count)
        return total / count


class Gathers(Centred):
    def mean(self, total, number):
        everywhere = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, total.detach().clone())
        return torch.stack(everywhere).sum(0) / number


class GathersNumbers(Centred):
    def mean(self, total, number):
        numbers = [0] * dist.get_world_size()
        dist.all_gather_object(numbers, number)
        return total / sum(numbers)


class Functional(Centred):
    def mean(self, total, number):
        return functional_collectives.all_reduce(total.detach().clone(), "sum", dist.group.WORLD) / number


class Differentiable(Centred):
    def mean(self, total, number):
        return torch.stack(differentiable.all_gather(total)).sum(0) / number


class InBackward(Centred):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            loss.register_hook(self.summed)
        return loss

    def mean(self, total, number):
        return total / number

    def summed(self, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class InABlock(Centred):
    def __init__(self):
        super().__init__()
        self.blocks[1].mlp.register_forward_pre_hook(self.moved)

    def moved(self, block, args):
        count = torch.ones(())
        if dist.is_initialized():
            dist.all_reduce(count)
        return (args[0] * count,)

    def mean(self, total, number):
        return total / number


class Once(Centred):
    """What copies of samples do not change, and what knows which ranks have other samples."""

    def mean(self, total, number):
        total, largest = total.detach().clone(), total.detach().clone()
        dist.broadcast(total, src=0)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        largest = functional_collectives.all_reduce(largest, "max", dist.group.WORLD) + 0
        dist.barrier()
        total = torch.minimum(total, largest)
        dist.all_reduce(total, group=self.trainer.strategy.data_group)
        return self.all_gather(total).sum(0) / number


DATA = lambda size: (torch.randn(size, 6, WIDTH), torch.randn(size, 4))  # noqa: E731


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
@pytest.mark.parametrize("strategy", ["tp", *nightly("cp")])
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (Sums, "all_reduce"),
        (Gathers, "all_gather"),
        (GathersNumbers, "all_gather_object"),
        (Functional, "all_reduce"),
        (Differentiable, "all_gather"),
        (InBackward, "all_reduce"),
        (InABlock, "all_reduce"),
    ],
)
def test_what_would_count_samples_twice_is_refused_by_line(make, function, strategy):
    found = run(Model(make, DATA), strategy)
    assert found.kind == "refused", found
    axis = f"of which 2 on the axis '{strategy}' have the same samples: these would count 2 times"
    assert f"communicates with other ranks ({function}), {axis}" in found.detail
    assert "test_own_collectives_integration.py" in found.detail


@pytest.mark.parametrize("strategy", ["tp", "cp"])
def test_what_counts_each_sample_once_is_right(strategy):
    assert run(Model(Once, DATA), strategy).kind == "equal"
