"""What blocks and steps keep on objects: read where it is, it is right; where another stage has it, that is said."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.pipeline.absent import CutError

from .relay import Relay

ROWS = torch.ones(2, 4)


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Block(nn.Module):
    """Keeps things on itself as mixtures of experts do, some of which only it needs."""

    def __init__(self, collected: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(4, 4), Router()
        self.collected = collected
        self.inner = nn.Module()
        self.inner.aux = None
        self.register_buffer("usage", torch.zeros(4))
        self.cache: Tensor | None = None
        self.num_calls = 0

    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        self.num_calls += 1
        if self.cache is None:
            self.cache = torch.arange(4.0)
        scores = self.router(x)
        self.usage += scores.detach().mean(0)
        self.inner.aux = scores.square().sum()
        self.collected.append(scores.max().detach())
        if losses is not None:
            losses.append(scores.sum())
        return torch.tanh(self.linear(x)) * scores + self.cache


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.collected: list[Tensor] = []
        self.blocks = nn.ModuleList(Block(self.collected) for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.history: list[float] = []
        self.num_steps = 0


def plain(net: Net) -> Tensor:
    net.num_steps += 1
    x = ROWS
    for block in net.blocks:
        x = block(x)
    return net.head(x).sum()


def own(net: Net) -> Tensor:
    """Reads what the last stage's blocks keep."""
    return plain(net) + net.blocks[3].inner.aux + net.blocks[2].usage.sum()


@pytest.mark.parametrize("step", [plain, own])
def test_what_is_read_where_it_was_written_is_right(step):
    net = Net()
    relay = Relay(Net(), 2, step)
    for _ in range(2):
        torch.testing.assert_close(relay.run(), step(net))
    assert type(relay.parts[1].cut.module.blocks[0]).__name__ == "Block"


def attribute(net: Net) -> Tensor:
    return plain(net) + sum(block.inner.aux for block in net.blocks)


def buffer(net: Net) -> Tensor:
    return plain(net) + net.blocks[0].usage.sum()


def number(net: Net) -> Tensor:
    return plain(net) * net.blocks[1].num_calls


def alias(net: Net) -> Tensor:
    return plain(net) + net.collected[0]


def argument(net: Net) -> Tensor:
    x, losses = ROWS, []
    for block in net.blocks:
        x = block(x, losses)
    return net.head(x).sum() + sum(losses)


def hook(net: Net) -> Tensor:
    outputs: list[Tensor] = []
    handles = [
        block.router.register_forward_hook(lambda module, args, output: outputs.append(output)) for block in net.blocks
    ]
    loss = plain(net)
    for handle in handles:
        handle.remove()
    return loss + sum(output.sum() for output in outputs)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (attribute, r"in <genexpr>: .* reads 'aux' of 'blocks.0.inner', which the block 'blocks.0' writes on another"),
        (buffer, r"in buffer: .* reads 'usage' of 'blocks.0', which the block 'blocks.0' writes on another"),
        (number, r"in number: .* reads 'num_calls' of 'blocks.1', .* as in `x, aux ="),
        (alias, r"in alias: .* reads 'collected' of Net, which the block 'blocks.1' writes on another"),
        (argument, r"'blocks.0' writes into a list or dict that it is called with"),
        (hook, r"the forward hook 'hook.<locals>.*' on 'blocks.0.router', which lies inside of a block, keeps what"),
    ],
)
def test_what_another_stage_has_is_not_read(step, message):
    with pytest.raises(CutError, match=message):
        Relay(Net(), 2, step).run()


def counts(net: Net) -> Tensor:
    loss = plain(net)
    net.history.append(float(loss.detach()))
    return loss


def test_between_steps_neither():
    relay = Relay(Net(), 2, counts)
    relay.run()
    for part, read, message in (
        (0, lambda net: net.history, r"in <lambda>: .* reads 'history' of Net, which `step` writes on another"),
        (0, lambda net: net.blocks[3].usage, "reads 'usage' of 'blocks.3', which the block 'blocks.3' writes"),
        (1, lambda net: net.blocks[1].inner.aux, "reads 'aux' of 'blocks.1.inner'"),
    ):
        with pytest.raises(CutError, match=message):
            read(relay.parts[part].cut.module)
    first, last = (part.cut.module for part in relay.parts)
    assert len(last.history) == 1
    assert first.num_steps == 2  # with the trial run, which the runner undoes
    for part in relay.parts:
        part.cut.readers.close()
    assert first.history == []
    assert type(first.blocks[3]) is Block
