"""What a micro-batch leaves behind and the next one uses is refused by name, wherever it is kept; nothing else is."""

import collections
import contextvars
import dataclasses
import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.micro_batches import state_problem
from polyphase.engine.strategies.pipeline.reachable_state import Walk

from .relay import Relay

ROWS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
NUM_CALLS = 0
LOSSES: list[Tensor] = []
TABLES: dict[int, Tensor] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor(x.detach())

    def factor(self, x: Tensor) -> Any:
        return 1.0


class Counted(Block):
    """Begins to count long before it shows."""

    calls = 0

    def factor(self, x):
        self.calls += 1
        return 1.0 if self.calls < 100 else 0.5


class CountedByClass(Block):
    calls = 0

    def factor(self, x):
        CountedByClass.calls += 1
        return 1.0 if CountedByClass.calls < 100 else 0.5


class CountedGlobally(Block):
    def factor(self, x):
        global NUM_CALLS
        NUM_CALLS += 1
        return 1.0 if NUM_CALLS < 100 else 0.5


class CountedInAnObject(Block):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(calls=0)

    def factor(self, x):
        self.state.calls += 1
        return 1.0 if self.state.calls < 100 else 0.5


class Remembers(Block):
    def __init__(self):
        super().__init__()
        self.memory: dict[str, Tensor] = {}

    def factor(self, x):
        last = self.memory.get("mean", torch.ones(()))
        self.memory["mean"] = x.mean()
        return last


class LargestSoFar(Block):
    """Is the same after the same values, and not after others."""

    def __init__(self):
        super().__init__()
        self.largest = torch.full((), -1e9)

    def factor(self, x):
        self.largest = torch.maximum(self.largest, x.max())
        return self.largest


class InitialisedByData(Block):
    scale: Tensor | None = None

    def factor(self, x):
        if self.scale is None:
            self.scale = 1 / x.std()
        return self.scale


class ShrinksItsWeight(Block):
    def factor(self, x):
        self.linear.weight.data.mul_(0.9)
        return 1.0


class TakesTurns(Block):
    def __init__(self):
        super().__init__()
        self.turns = itertools.cycle([1.0, 0.5])

    def factor(self, x):
        return next(self.turns)


class DrawsItsOwn(Block):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def factor(self, x):
        return torch.rand(4, generator=self.generator)


class Yields(Block):
    def __init__(self):
        super().__init__()
        self.factors = iter([1.0] * 100 + [0.5] * 100)

    def factor(self, x):
        return next(self.factors)


class Defaults(Block):
    def factor(self, x, calls=[]):  # noqa: B006
        calls.append(1)
        return 1.0 if len(calls) < 100 else 0.5


class Scales(torch.autograd.Function):
    """Scales gradients by how many there were."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Scales.calls += 1
        return gradient * Scales.calls


class CountsInBackward(Block):
    def factor(self, x):
        return 1.0

    def forward(self, x):
        return Scales.apply(super().forward(x))


class CountsInAHook(Block):
    def __init__(self):
        super().__init__()
        self.seen = 0
        self.linear.register_full_backward_hook(self.count)

    def count(self, linear, gradients, of_output):
        self.seen += 1
        return (gradients[0] * self.seen,)


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(2))


def step(net: Net, rows: Tensor) -> Tensor:
    x = net.into(rows)
    for block in net.blocks:
        x = block(x)
    return x.square().mean()


def problems(block: type[Block], number: int = 2, run: Any = step) -> list[str | None]:
    """What is wrong, for each stage; its state must be as it was."""
    relay = Relay(Net(block), 2, lambda net: run(net, ROWS[0]))
    for part in relay.parts:
        module = part.partitioned.module
        part.partitioned.job = dataclasses.replace(
            part.partitioned.job,  # type: ignore[arg-type]
            step=lambda index, module=module: run(module, ROWS[index]),
        )
    return [state_problem(part, number) for part in relay.parts]


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (Counted, "the attribute 'blocks.0.calls' is changed by each micro-batch"),
        (CountedByClass, "the block 'blocks.0' writes into the class attribute 'calls' of CountedByClass"),
        (CountedGlobally, "the block 'blocks.0' writes into the global 'NUM_CALLS' of .*test_micro_batch_state"),
        (CountedInAnObject, "the attribute 'blocks.0.state'"),
        (Remembers, "the attribute 'blocks.0.memory'"),
        (LargestSoFar, "the attribute 'blocks.0.largest'"),
        (InitialisedByData, "the attribute 'blocks.0.scale'"),
        (ShrinksItsWeight, "the parameter 'blocks.0.linear.weight'"),
        (TakesTurns, "the attribute 'blocks.0.turns'"),
        (DrawsItsOwn, "the attribute 'blocks.0.generator'"),
        (Yields, "the attribute 'blocks.0.factors'"),
        (CountsInBackward, "the class attribute 'calls' of Scales is changed by each micro-batch"),
        (CountsInAHook, "the attribute 'blocks.0.seen' is changed by each micro-batch"),
        (Defaults, "the block 'blocks.0' writes into the default argument 'default 0' of Defaults.factor"),
    ],
)
def test_state_that_advances_once_a_micro_batch_is_named(block, name):
    first, second = problems(block)
    assert first is not None
    assert second is not None
    with pytest.raises(CutError, match=name):
        raise CutError(first)


def _calls(block: nn.Module) -> Any:
    attributes = vars(block)  # which the guard does not see
    return attributes["state"].calls if "state" in attributes else attributes.get("calls")


def test_what_was_tried_is_undone():
    for block in (Counted, CountedInAnObject):
        relay = Relay(Net(block), 2, lambda net: step(net, ROWS[0]))
        for part in relay.parts:
            before = [_calls(b) for b in part.partitioned.module.blocks]
            state_problem(part, 2)
            assert [_calls(b) for b in part.partitioned.module.blocks] == before


class Leaves(Block):
    """Keeps what it makes, and reads it no more."""

    def factor(self, x):
        self.aux, self.losses = x.mean(), [x.sum()]
        return self.aux * 0 + 1


class Caches(Block):
    table: Tensor | None = None

    def factor(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.ones(4)
        return self.table + TABLES[len(x)]


class Bounded(Block):
    """Brings its weight back into its bounds, which changes nothing the second time."""

    def factor(self, x):
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return 1.0


class Table(collections.OrderedDict[str, Any]):
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


FUNCTIONS = Table(relu=nn.ReLU, conv=nn.Conv2d)  # of which one can't be made without arguments


class LooksUp(Block):
    def factor(self, x):
        return FUNCTIONS["relu"](x)


@pytest.mark.parametrize("block", [Block, Leaves, Caches, Bounded, LooksUp])
def test_what_no_micro_batch_reads_and_what_is_the_same_for_all_is_no_state(block):
    assert problems(block) == [None, None]


@pytest.mark.parametrize("block", [Counted, Remembers, InitialisedByData])
def test_one_micro_batch_is_a_batch(block):
    assert problems(block, number=1) == [None, None]


def counting(net: Net, rows: Tensor) -> Tensor:
    net.num_steps = getattr(net, "num_steps", 0) + 1
    return step(net, rows) * (1.0 if net.num_steps < 100 else 0.5)


def test_state_of_the_step_itself_is_named_too():
    assert all(
        str(problem).startswith("the attribute 'num_steps' of Net is") for problem in problems(Block, 2, counting)
    )


class Adds(Block):
    def factor(self, x):
        LOSSES.append(x.mean())
        return 1.0


def with_losses(net: Net, rows: Tensor) -> Tensor:
    LOSSES.clear()
    return step(net, rows) + sum(LOSSES)


@pytest.mark.parametrize("number", [1, 2])
def test_what_blocks_add_to_a_list_of_their_file_is_refused(number):
    first, _ = problems(Adds, number, with_losses)
    assert "the block 'blocks.0' writes into the global 'LOSSES' of" in str(first)


class Collector:
    """A context variable in an object of a library, as in transformers from 5.24 on."""

    def __init__(self) -> None:
        self.variable: Any = contextvars.ContextVar("collected", default=None)

    def get(self) -> Any:
        return self.variable.get()


COLLECTOR = Collector()


def collect(module: nn.Module, args: Any, output: Tensor) -> None:
    if (collected := COLLECTOR.get()) is not None:
        collected["logits"].append(output)


def test_values_that_a_hook_inside_of_a_block_collects_in_a_context_variable_are_refused():
    def run(net: Net) -> Tensor:
        collected: dict[str, list[Tensor]] = {"logits": []}
        token = COLLECTOR.variable.set(collected)
        try:
            return step(net, ROWS[0]) + sum(logits.mean() for logits in collected["logits"])
        finally:
            COLLECTOR.variable.reset(token)

    net = Net(Block)
    for block in net.blocks:
        block.linear.register_forward_hook(collect)
    with pytest.raises(CutError, match=r"the forward hook 'collect' on 'blocks.0.linear', which lies inside"):
        Relay(net, 2, run).run()


def calls_of(num_layers: int) -> list[int]:
    """The number of Python calls of the first step and of a later one, by the first stage of two."""
    net = Net(Block)
    net.blocks = nn.ModuleList(Block() for _ in range(num_layers))
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    relay = Relay(net, 2, lambda net: step(net, ROWS[0]))
    [first, _], counts = relay.parts, []
    for is_first in (True, False):
        count = 0
        sys.setprofile(note)
        try:
            if is_first:
                first.partitioned.written = {}
                first.try_out()
                state_problem(first, 2)
            else:
                first.partitioned.written = None
                first()
        finally:
            sys.setprofile(None)
        counts.append(count)
    return counts


def test_a_step_costs_twice_as_much_with_twice_as_many_layers():
    few, many = calls_of(50), calls_of(100)
    assert [b / a <= 2.2 for a, b in zip(few, many, strict=True)] == [True, True], (few, many)


class Node:
    """An object that refers to others."""

    others: list["Node"]
    value = 0


def test_objects_that_refer_to_each_other_are_looked_at_once():
    layers = [[Node() for _ in range(30)] for _ in range(8)]
    for layer, following in itertools.pairwise(layers):
        for node in layer:
            node.others = following
    before, after = (repr(Walk(()).mark(layers[0])) for _ in range(2))
    assert before == after
    assert len(before) < 100_000, "there are 30 ** 4 ways to the objects of the fourth layer"
    layers[3][7].value = 1
    assert repr(Walk(()).mark(layers[0])) != before


def test_of_more_objects_than_a_module_has_the_first_are_looked_at():
    walk = Walk(())
    walk.mark([[Node() for _ in range(200)] for _ in range(200)])
    assert 5_000 < len(walk.containers) < 15_000
