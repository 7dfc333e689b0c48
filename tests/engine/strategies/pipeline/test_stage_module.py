"""Each stage does its part of the step as it was written: same loss, same gradients; and what can't be cut says why."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.plan import RemoteTensor

from .relay import Relay


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        y = y if bias is None else y + bias
        return y if mask is None else y * mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.embed = nn.Embedding(6, 4)
        self.norm_in = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)


IDS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def loss_of(net: Net, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net.head(net.norm(x)).flatten(0, 1) * net.scale, IDS.flatten())


def plain(net: Net) -> Tensor:
    x = net.embed(IDS)
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x)


def residual(net: Net) -> Tensor:
    x = net.embed(IDS) * net.scale
    for block in net.blocks:
        x = x + block(x)
    return loss_of(net, x)


def made_anew(net: Net) -> Tensor:
    """Masks and positions made for the device and shape of what other stages have."""
    x = net.embed(IDS)
    positions = torch.arange(x.shape[1], device=x.device)
    mask = torch.ones_like(x) * (positions < 2).to(x)[None, :, None]
    x = net.norm_in(x.flatten(0, 1)).view_as(x)
    for block in net.blocks:
        x = block(x, mask=mask)
    return loss_of(net, x)


def shared_bias(net: Net) -> Tensor:
    """What depends on the first stage's parameters is an argument of every block."""
    x = net.embed(IDS)
    bias = net.embed.weight[:3].sin() * 2
    for block in net.blocks:
        x = block(x, bias)
    return loss_of(net, x)


def viewed(net: Net) -> Tensor:
    """A view that others are views of can't be filled in place."""
    x = net.embed(IDS)
    first, rest = x[:, :1], x[:, 1:]
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x) + 0 * (first.shape[1] + rest.shape[1])


def checkpointed(net: Net) -> Tensor:
    x = net.embed(IDS)
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return loss_of(net, x)


def skip(net: Net) -> Tensor:
    first = net.embed(IDS)
    x = first
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x + first.cos())


def regularised(net: Net) -> Tensor:
    return plain(net) + net.embed.weight.square().sum()


def late(net: Net) -> Tensor:
    x = net.embed(IDS)
    scale = net.embed.weight.mean(0)
    for number, block in enumerate(net.blocks):
        x = block(x, scale if number > 2 else None)
    return loss_of(net, x)


def frozen(net: Net) -> Tensor:
    return plain(net)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "step", [plain, residual, made_anew, shared_bias, viewed, checkpointed, skip, regularised, late]
)
def test_loss_and_gradients_are_those_of_the_whole(step, num_stages):
    net = Net()
    expected = step(net)
    expected.backward()
    relay = Relay(Net(), num_stages, step)
    torch.testing.assert_close(relay.run(), expected)
    found = relay.gradients()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found.get(name), parameter.grad)


def test_tied_parameters_have_a_gradient_on_each_stage():
    def tied() -> Net:
        net = Net()
        net.head.weight = net.embed.weight
        return net

    net = tied()
    residual(net).backward()
    relay = Relay(tied(), 2, residual)
    relay.run()
    torch.testing.assert_close(relay.gradients()["embed.weight"], net.embed.weight.grad)
    assert not any(isinstance(part.partitioned.module.embed.weight, RemoteTensor) for part in relay.parts)


def test_a_frozen_first_stage_hands_over_all_the_same():
    def partly() -> Net:
        net = Net()
        net.embed.requires_grad_(False)
        net.scale.requires_grad_(False)
        net.blocks[:2].requires_grad_(False)
        net.norm_in.requires_grad_(False)
        return net

    net = partly()
    plain(net).backward()
    relay = Relay(partly(), 2, plain)
    relay.run()
    torch.testing.assert_close(relay.gradients()["blocks.2.linear.weight"], net.blocks[2].linear.weight.grad)


def test_a_sequential_is_cut_between_its_children():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    expected = net(torch.ones(2, 3)).mean()
    for num_stages in (2, 3, 5):
        relay = Relay(nn.Sequential(net), num_stages, lambda own: own(torch.ones(2, 3)).mean())
        torch.testing.assert_close(relay.run(), expected)


def test_without_gradients_nothing_needs_one():
    with torch.no_grad():
        assert torch.equal(Relay(Net(), 3, residual).run(backward=False), residual(Net()))


def test_outputs_may_be_nested():
    with torch.no_grad():
        output = Relay(Net(), 2, lambda net: {"a": (plain(net), "text"), "b": None}).run(backward=False)
    assert torch.equal(output["a"][0], plain(Net()))
    assert output["a"][1] == "text"


def backwards(net: Net) -> Tensor:
    x = net.embed(IDS)
    for block in reversed(net.blocks):
        x = block(x)
    return loss_of(net, x)


def twice(net: Net) -> Tensor:
    x = net.embed(IDS)
    for block in [*net.blocks, *net.blocks]:
        x = block(x)
    return loss_of(net, x)


def reads(net: Net) -> Tensor:
    x = net.embed(IDS)
    if x.sum() > 0:
        x = x + 1
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x)


def depends(net: Net) -> Tensor:
    x = net.embed(IDS)
    x = x[x[..., 0] > 0]
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x)


def writes(net: Net) -> Tensor:
    x = torch.zeros(2, 3, 4)
    x[:, 1:] = net.embed(IDS)[:, 1:]
    for block in net.blocks:
        x = block(x)
    return loss_of(net, x)


def never(net: Net) -> Tensor:
    return loss_of(net, net.embed(IDS))


def without_gradient(net: Net) -> Tensor:
    x = net.embed(IDS)
    for block in net.blocks:
        x = block(x).detach()
    return loss_of(net, x)


def compares_with_frozen(net: Net) -> Tensor:
    """The blocks are called without gradients, what is trained is elsewhere."""
    x = target = net.embed(IDS)
    with torch.no_grad():
        for block in net.blocks:
            target = block(target)
    return loss_of(net, x) + (x - target).square().mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :2], r"\[2, 2, 4\] of torch.float32, but gave it \[2, 3, 4\] of torch.float32 for the first"),
        (torch.Tensor.double, r"\[2, 3, 4\] of torch.float64, but gave it \[2, 3, 4\] of torch.float32"),
    ],
)
def test_what_is_handed_over_has_the_form_that_the_next_stage_expects(change, message):
    later: list[bool] = []

    def changes(net: Net) -> Tensor:
        x = net.embed(IDS)
        for number, block in enumerate(net.blocks):
            x = block(change(x) if later and number == 2 else x)
        return loss_of(net, x)

    relay = Relay(Net(), 2, changes)
    relay.run()
    later.append(True)
    with pytest.raises(CutError, match=rf"in changes: .* gives 'blocks.2' tensors {message}.*Give the batch itself"):
        relay.run()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (backwards, r"in backwards: .* calls 'blocks.3' out of order"),
        (twice, r"in twice: .* calls 'blocks.0' out of order"),
        (reads, r'in reads: "if x.sum\(\) > 0:" reads a value that another pipeline stage has'),
        (depends, r'in depends: "x = x\[x\[..., 0\] > 0\]" can\'t be done without the values'),
        (writes, r"in writes: .* writes a value that another pipeline stage has into a tensor \(__setitem__\)"),
        (never, r"the step returned without having called 'blocks.2'"),
        (without_gradient, r"the arguments of 'blocks.2' have no gradient"),
        (compares_with_frozen, r"the arguments of 'blocks.2' have no gradient.*name others than those in a method"),
    ],
)
def test_what_can_not_be_cut_names_the_line(step, message):
    with pytest.raises(CutError, match=message):
        Relay(Net(), 4 if step is backwards else 2, step).run()
