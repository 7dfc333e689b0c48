"""A block that counts outside of itself counts once: whatever its code names is as it was when it is computed again.

Expected values are those of a plain loop; each block multiplies by its count, so that one too many is another result.
"""

import collections
import contextvars
import itertools
import random
import types

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ..tiny import engine
from .test_recompute_arguments import DIM, NUM_BLOCKS, data, plain

KINDS = ("full", "selective")

num_calls = 0
calls: list[float] = []
by_name = collections.Counter()
totals = np.zeros(2)
on_device = torch.zeros(())
draws = random.Random(1)
counters = types.ModuleType("counters")
counters.n = 0
in_context: contextvars.ContextVar[int] = contextvars.ContextVar("in_context", default=0)


def bump() -> int:
    return deeper()


def deeper() -> int:
    global num_calls
    num_calls += 1
    return num_calls


def closure():
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


class Tally:
    total = 0

    def count(self) -> int:
        Tally.total += 1
        return Tally.total


class Block(nn.Module):
    """Its factor is 1, 2, 3 and so on, with each call of any of the blocks."""

    calls = 0
    count = staticmethod(closure())

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.tally = Tally()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh() * (1 + self.factor(x) / 10))


class OfAHelper(Block):
    def factor(self, x):
        return bump()


class OfItsClass(Block):
    def factor(self, x):
        Block.calls += 1
        return self.calls


class Created(Block):
    def factor(self, x):
        type(self).made = getattr(type(self), "made", 0) + 1
        return self.made


class CreatedAsGlobal(Block):
    def factor(self, x):
        globals()["made_later"] = globals().get("made_later", 0) + 1
        return made_later  # noqa: F821


class OfAClosure(Block):
    def factor(self, x):
        return self.count()


class OfAModule(Block):
    def factor(self, x):
        counters.n += 1
        return counters.n


class OfAFunction(Block):
    def factor(self, x):
        bump.n = getattr(bump, "n", 0) + 1
        return bump.n


class InAList(Block):
    def factor(self, x):
        calls.append(0.0)
        return len(calls)


class InACounter(Block):
    def factor(self, x):
        by_name["calls"] += 1
        return by_name["calls"]


class InAnArray(Block):
    def factor(self, x):
        totals[0] += 1
        return float(totals[0])


class InATensor(Block):
    def factor(self, x):
        on_device.add_(1)
        return on_device.clone()


class InAContext(Block):
    def factor(self, x):
        in_context.set(in_context.get() + 1)
        return in_context.get()


class InAnObject(Block):
    def factor(self, x):
        return self.tally.count()


class OnAParameter(Block):
    def factor(self, x):
        self.up.weight.calls = getattr(self.up.weight, "calls", 0) + 1
        return self.up.weight.calls


class Draws(Block):
    def factor(self, x):
        return draws.random()


class ByItsAutograd(Block):
    class Identity(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            ByItsAutograd.Identity.calls += 1
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def factor(self, x):
        self.Identity.apply(x)
        return self.Identity.calls


COUNTING = [
    OfAHelper, OfItsClass, Created, CreatedAsGlobal, OfAClosure, OfAModule, OfAFunction, InAList, InACounter, InAnArray,
    InATensor, InAContext, InAnObject, OnAParameter, Draws, ByItsAutograd,
]  # fmt: skip


class Net(LightningModule):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(kind() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(DIM, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin() -> None:
    """Sets all counters to zero."""
    global num_calls, draws, on_device
    num_calls = counters.n = Block.calls = Tally.total = ByItsAutograd.Identity.calls = 0
    draws, on_device = random.Random(1), torch.zeros(())
    totals[:] = 0
    calls.clear()
    by_name.clear()
    in_context.set(0)
    globals().pop("made_later", None)
    vars(bump).clear()
    for kind in COUNTING:
        kind.count = staticmethod(closure())
    if "made" in vars(Created):
        del Created.made


def run(kind: type[Block], activation_checkpointing: str) -> LightningModule:
    begin()
    module = Net(kind)
    engine(activation_checkpointing=activation_checkpointing).fit(module, data())
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", COUNTING)
def test_a_block_counts_once_wherever_it_counts(block, kind):
    begin()
    expected = plain(Net(block))
    last = expected.blocks[0].factor(torch.zeros(1, DIM))
    module = run(block, kind)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert module.blocks[0].factor(torch.zeros(1, DIM)) == last


class FromAnIterator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def factor(self, x):
        return next(self.numbers)


class FromAGenerator(FromAnIterator):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (n for n in range(1000))


@pytest.mark.parametrize("block", [FromAnIterator, FromAGenerator])
def test_an_iterator_that_a_block_advances_is_refused(block):
    with pytest.raises(RuntimeError, match=f"the forward of {block.__name__} takes the next value of an iterator"):
        run(block, "full")
