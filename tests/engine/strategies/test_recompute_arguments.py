"""A block that writes into what it is handed, or into what its code refers to, writes once: a repeated forward starts
with the contents of the first one. Expected values are those of a plain loop.
"""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..tiny import engine

KINDS = ("full", "selective")
NUM_BLOCKS, DIM, BATCH, STEPS = 3, 8, 4, 3
SEEN: list[float] = []
NUM_CALLS = 0


class Layer:
    keys: Tensor | None = None


class Cache:
    """As decoders of transformers have it: each block appends its keys to those that it is handed."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(NUM_BLOCKS)]

    def update(self, keys: Tensor, number: int) -> Tensor:
        layer = self.layers[number]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys])
        return layer.keys


@dataclasses.dataclass(slots=True)
class Carried:
    losses: list[Tensor]
    total: Tensor | float = 0.0


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        h = self.up(x).tanh()
        return x + self.down(self.write(h, state))

    def write(self, h: Tensor, state: Any) -> Tensor:
        raise NotImplementedError


class AppendsKeys(Block):
    make, auxiliary = Cache, None

    def write(self, h, state):
        keys = state.update(h, self.number)
        return (h @ keys.T).softmax(-1) @ keys


class Appends(Block):
    make = list
    auxiliary = staticmethod(sum)

    def write(self, h, state):
        state.append(h.square().mean())
        return h * len(state)


class Pops(Block):
    """Each takes the last of some scales."""

    auxiliary = None

    @staticmethod
    def make():
        return [torch.full((DIM,), float(number)) for number in range(NUM_BLOCKS)]

    def write(self, h, state):
        return h * state.pop()


class AddsInPlace(Block):
    auxiliary = staticmethod(lambda state: state["loss"])

    @staticmethod
    def make():
        return {"loss": torch.zeros(()), "calls": 0}

    def write(self, h, state):
        state["loss"] += h.square().mean()
        state["calls"] += 1
        return h * state["calls"] * (1 + state["loss"].detach())


class SetsFields(Block):
    auxiliary = staticmethod(lambda state: state.total + sum(state.losses))

    @staticmethod
    def make():
        return Carried([])

    def write(self, h, state):
        state.total = state.total + h.square().mean()
        state.losses.append(h.abs().mean())
        return h * len(state.losses)


class CallsBack(Block):
    """Is handed the method of a list that it has no other way to."""

    @staticmethod
    def make():
        losses: list[Tensor] = []
        return losses.append, losses.__len__, losses.copy

    auxiliary = staticmethod(lambda state: sum(state[2]()))

    def write(self, h, state):
        state[0](h.square().mean())
        return h * state[1]()


class WritesGlobals(Block):
    make, auxiliary = list, None
    of_class: list[float] = []  # noqa: RUF012

    def forward(self, x, state):
        global NUM_CALLS
        NUM_CALLS += 1
        SEEN.append(x.sum().item())
        self.of_class.append(0)
        return x + self.down(self.up(x).tanh() * NUM_CALLS / len(SEEN) / len(self.of_class))


class Net(LightningModule):
    def __init__(self, kind: type[Block], hooked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind(number) for number in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, 1)
        self.kind = kind
        if hooked:
            self.activations: list[Tensor] = []
            for block in self.blocks:
                block.up.register_forward_hook(lambda *call: self.activations.append(call[2].square().mean()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, self.state = batch[0], self.kind.make()
        for block in self.blocks:
            x = block(x, self.state)
        loss = self.head(x).square().mean()
        return loss if self.kind.auxiliary is None else loss + 0.1 * self.kind.auxiliary(self.state)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> DataLoader:
    inputs = torch.randn(STEPS * BATCH, DIM, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=BATCH)


def plain(module: LightningModule) -> LightningModule:
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(data()):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        optimizer.step()
    return module


def content(state: Any) -> Any:
    """Returns the numbers in a state."""
    if isinstance(state, Tensor):
        return state.detach().double().numpy()
    if isinstance(state, (list, tuple)):
        return [content(item) for item in state]
    if isinstance(state, dict):
        return {key: content(item) for key, item in state.items()}
    if isinstance(state, Carried):
        return content([state.losses, state.total])
    return content(vars(state)) if isinstance(state, (Cache, Layer)) else state


def assert_equal(module: LightningModule, expected: LightningModule) -> None:
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [AppendsKeys, Appends, Pops, AddsInPlace, SetsFields, CallsBack, WritesGlobals])
def test_what_a_block_writes_into_is_written_once(block, kind):
    states, numbers = [], []
    for run in (plain, lambda module: engine(activation_checkpointing=kind).fit(module, data()) or module):
        global NUM_CALLS
        NUM_CALLS = 0
        SEEN.clear()
        WritesGlobals.of_class.clear()
        module = run(Net(block))
        states.append(module)
        numbers.append([NUM_CALLS, len(WritesGlobals.of_class), *SEEN])
    expected, module = states
    assert_equal(module, expected)
    assert numbers[0] == pytest.approx(numbers[1])
    if block is not CallsBack:
        torch.testing.assert_close(content(module.state), content(expected.state), rtol=1e-5, atol=1e-6)


class WritesParent(Block):
    """Is handed the module that it belongs to."""

    make = auxiliary = None

    def write(self, h, state):
        state.losses.append(h.square().mean())
        state.num_calls += 1
        state.sums += h.detach().sum()
        return h * state.num_calls


class Parent(Net):
    def __init__(self) -> None:
        super().__init__(WritesParent)
        self.num_calls, self.losses = 0, []
        self.register_buffer("sums", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, self.losses = batch[0], []
        for block in self.blocks:
            x = block(x, self)
        return self.head(x).square().mean() + 0.1 * sum(self.losses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_handed_its_parent_writes_there_once(kind):
    expected, module = plain(Parent()), Parent()
    engine(activation_checkpointing=kind).fit(module, data())
    assert_equal(module, expected)
    assert (module.num_calls, len(module.losses)) == (expected.num_calls, len(expected.losses)) == (9, 3)
    torch.testing.assert_close(module.sums, expected.sums)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_inside_of_a_block_keep_each_output_once(kind):
    expected, module = plain(Net(Appends, hooked=True)), Net(Appends, hooked=True)
    engine(activation_checkpointing=kind).fit(module, data())
    assert_equal(module, expected)
    assert len(module.activations) == len(expected.activations) == NUM_BLOCKS * STEPS


class AddsToItsInput(Block):
    make, auxiliary = list, None

    def forward(self, x, state):
        x += self.down.bias
        return self.down(self.up(x).tanh())


class Later(AddsInPlace):
    """Leaves the tensor alone in its first call."""

    def write(self, h, state):
        self.calls = getattr(self, "calls", 0) + 1
        return super().write(h, state) if self.calls > 1 else h


class DecaysLater(Block):
    make, auxiliary = list, None

    def forward(self, x, state):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 1:
            self.up.weight.data.mul_(0.9)
        return x + self.down(self.up(x).tanh())


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (AddsToItsInput, "the forward of AddsToItsInput writes in place into a tensor that it is called with"),
        (DecaysLater, "the forward of DecaysLater writes in place into its parameter 'up.weight'"),
        (Later, "writes in place into a tensor in a list, dict or object that it has left alone before"),
    ],
)
def test_tensors_that_the_repeated_forward_would_find_written_are_refused(block, said):
    assert_equal(plain(Net(block)), plain(Net(block)))  # which is a right program
    with pytest.raises(RuntimeError, match=f"activation_checkpointing='full' is refused: .*{said}"):
        engine(activation_checkpointing="full").fit(Net(block), data())


class Clamps(Block):
    make, auxiliary = list, None
    by = staticmethod(lambda weight: weight.clamp_(-0.2, 0.2))

    def forward(self, x, state):
        with torch.no_grad():
            self.by(self.up.weight)
        return x + self.down(self.up(x).tanh())


class Decays(Clamps):
    by = staticmethod(lambda weight: weight.mul_(0.9))


class DecaysData(Clamps):
    by = staticmethod(lambda weight: weight.data.mul_(0.9))


class DecaysAfter(Clamps):
    """Writes the weight when autograd has saved it, which does not see it."""

    def forward(self, x, state):
        y = x + self.down(self.up(x).tanh())
        self.down.weight.data.mul_(0.9)
        return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [Clamps, Decays, DecaysData, DecaysAfter])
def test_a_block_that_writes_its_weight(block, kind):
    expected, module = plain(Net(block)), Net(block)
    engine(activation_checkpointing=kind).fit(module, data())
    assert_equal(module, expected)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
