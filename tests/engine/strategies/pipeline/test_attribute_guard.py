"""What blocks and steps keep on objects: read where it is, it is right; where another stage has it, that is said."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.callers import CutError

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
    assert type(relay.parts[1].partitioned.module.blocks[0]).__name__ == "Block"


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
            read(relay.parts[part].partitioned.module)
    first, last = (part.partitioned.module for part in relay.parts)
    assert len(last.history) == 1
    assert first.num_steps == 1  # that of the trial run is undone
    for part in relay.parts:
        part.partitioned.guard.close()
    assert first.history == []
    assert type(first.blocks[3]) is Block


class Twice(nn.Module):
    """A module with state, `shared`, that is called before and behind the blocks, or in each of them."""

    def __init__(self, shared: nn.Module, *, in_blocks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.shared = nn.Linear(4, 4), shared
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), *([shared] if in_blocks else [nn.Tanh()])) for _ in range(4)
        )
        self.in_blocks = in_blocks


def twice(net: Twice) -> Tensor:
    x = net.into(torch.arange(8.0).view(2, 4).sin())
    if not net.in_blocks:
        x = net.shared(x)
    for block in net.blocks:
        x = block(x)
    return (x if net.in_blocks else net.shared(x)).square().sum()


class Mean(nn.Module):
    """Makes its statistic anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Data(Mean):
    """Writes it in a way that torch does not count."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(x.detach().mean(0).data, 0.1)
        return x - self.mean


class Instances(nn.InstanceNorm1d):
    """Counts no batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.T[None])[0].T + x


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x / self.num_calls


class Momentum(nn.Module):
    """Changes an attribute that is no buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class UnitRows(nn.Linear):
    """Brings its weight to unit length in place, as prototypes are."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(1.0 + self.weight.norm())
        return super().forward(x)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    ("shared", "name"),
    [
        (lambda: nn.BatchNorm1d(4), "'shared.(running_mean|running_var|num_batches_tracked)' of BatchNorm1d"),
        (
            lambda: nn.BatchNorm1d(4, affine=False),
            "'shared.(running_mean|running_var|num_batches_tracked)' of BatchNorm1d",
        ),
        (lambda: Instances(4, track_running_stats=True), "buffer 'shared.running_(mean|var)' of Instances"),
        (Mean, "buffer 'shared.mean' of Mean"),
        (Data, "buffer 'shared.mean' of Data"),
        (Counter, "attribute 'shared.num_calls' of Counter"),
        (Momentum, "attribute 'shared.mean' of Momentum"),
    ],
)
def test_state_that_two_stages_write_is_refused_before_the_first_step(shared, name, in_blocks):
    written = f"{name} is written by .* on pipeline stage 0 and .* on pipeline stage 1, and each stage has a copy"
    read = r"reads '\w+' of 'shared', which the block .* Have each place use a module"
    at_once = "lerp_.* writes a value that another pipeline stage has into a tensor"
    with pytest.raises(CutError, match=f"{written}|{read}|{at_once}"):
        Relay(Twice(shared(), in_blocks=in_blocks), 2, twice).run()


class Behind(Twice):
    """Of which the first stage does not know that it is used."""


def behind(net: Behind) -> Tensor:
    x = net.into(ROWS)
    for block in net.blocks:
        x = block(x)
    return net.shared(x).square().sum()


def test_a_lent_parameter_that_is_changed_in_place_is_refused():
    with pytest.raises(
        CutError, match=r"parameter 'shared.weight' of UnitRows is written by `step` on pipeline stage 1"
    ):
        Relay(Behind(UnitRows(4, 4)), 2, behind).run()


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0)
        return x + self.cache


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("shared", [Cached, lambda: nn.Dropout(0.5), nn.Identity])
def test_a_module_without_state_may_be_called_in_two_stages(shared, in_blocks):
    module = Twice(shared(), in_blocks=in_blocks)
    found = Relay(module, 2, twice).run()
    if not isinstance(module.shared, nn.Dropout):  # whose noise the relay does not seed
        torch.testing.assert_close(found, twice(module))


def train_behind_validate_before(net: Behind) -> Tensor:
    if net.training:
        return behind(net)
    x = net.shared(net.into(ROWS).detach()).detach()
    for block in net.blocks:
        x = block(x)
    return x.square().sum()


def test_statistics_of_another_stage_are_not_read_in_another_step():
    relay = Relay(Behind(nn.BatchNorm1d(4, affine=False)), 2, train_behind_validate_before)
    relay.run()
    for part in relay.parts:
        part.partitioned.module.eval()
    with pytest.raises(
        CutError, match=r"reads 'running_mean' of 'shared', which `step` writes on another .* Have each"
    ):
        relay.run(backward=False)
