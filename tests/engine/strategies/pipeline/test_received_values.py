"""Gradients within a step, and which stage is told of a value that it is sent."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.plan import RemoteTensor

from .relay import Relay

ROWS = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def balanced(net: Net) -> Tensor:
    """A weight for one of two losses, by their gradients of the last layer, as in a VQ-GAN."""
    found = net.head(net.hidden(ROWS))
    first, second = found.square().mean(), found.sin().mean()
    sizes = [torch.autograd.grad(loss, net.head.weight, retain_graph=True)[0].norm() for loss in (first, second)]
    return first + (sizes[0] / sizes[1]).detach() * second


def penalised(net: Net) -> Tensor:
    """The whole path is behind the blocks."""
    hidden = net.hidden(ROWS)
    between = (2 * hidden).detach().requires_grad_()
    loss = net.head(between).square().mean()
    (gradient,) = torch.autograd.grad(loss, between, create_graph=True)
    last = (2 * hidden).sin()
    (other,) = torch.autograd.grad(net.head(last).square().mean(), last, create_graph=True)
    return gradient.square().sum() + other.square().sum()


@pytest.mark.parametrize("step", [balanced, penalised])
def test_a_gradient_within_the_last_stage_is_that_of_the_whole(step):
    net = Net()
    step(net).backward()
    relay = Relay(Net(), 2, step)
    relay.run()
    found = relay.gradients()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found.get(name), parameter.grad)


def of_inputs(net: Net) -> Tensor:
    x = ROWS.clone().requires_grad_()
    loss = (net.head(net.hidden(x)) + x[:, :3]).square().mean()  # a path that goes past the blocks, too
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
    return loss + gradient.square().sum()


def of_earlier(net: Net) -> Tensor:
    embedded = net.embed(ROWS)
    x = embedded
    for block in net.blocks:
        x = block(x)
    loss = (net.head(x) + embedded[:, :3]).square().mean()
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True, allow_unused=True)
    return loss + gradient.square().sum()


def of_weights(net: Net) -> Tensor:
    loss = net.head(net.hidden(ROWS)).square().mean()
    found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
    return loss + sum(gradient.square().sum() for gradient in found if gradient is not None)


@pytest.mark.parametrize("step", [of_inputs, of_earlier, of_weights])
def test_a_gradient_that_has_paths_on_other_stages_is_refused(step):
    relay = Relay(Net(), 2, step)
    with pytest.raises(CutError, match=rf"in {step.__name__}: .* asks for a gradient within the step, but no pipeline"):
        relay.run()


class SometimesSkips(Net):
    calls = 0

    def forward(self) -> Tensor:
        self.calls += 1
        x = self.embed(ROWS)
        if self.calls > 2 and not isinstance(self.embed.weight, RemoteTensor):
            x = x + 0
        skip = x.sin()
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x + skip).square().mean()


def test_stages_whose_calls_differ_are_refused():
    class Differs(SometimesSkips):
        calls = 2

    with pytest.raises(CutError, match=r"pipeline stage 1 uses what sin returned, \[2, 4\] .* computes in another way"):
        Relay(Differs(), 2, lambda own: own())
