"""Attributes, classes and hooks of parameters are those of the objects that replace or copy them."""

import functools

import torch
from torch import Tensor, nn

from polyphase.engine.attachments import carry_over, copied


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0
        self.weight = Marked(torch.ones(2))
        self.bias = nn.Parameter(torch.ones(2))
        self.same = self.bias
        self.early = [self.weight]
        self.weight.no_decay = True
        self.bias.owner = self
        self.weight.register_hook(self.scale)
        self.handle = self.weight.register_hook(functools.partial(torch.mul, 5.0))
        self.bias.register_post_accumulate_grad_hook(self.halve)

    def scale(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor

    @staticmethod
    def halve(parameter: Tensor) -> None:
        parameter.grad.div_(2)

    def gradients(self) -> list[float]:
        self.zero_grad()
        (self.weight.sum() + self.bias.sum()).backward()
        return [float(self.weight.grad[0]), float(self.bias.grad[0])]


def test_a_copy_has_attributes_hooks_and_ties_of_its_own() -> None:
    module = Masked()
    own = copied(module)
    assert own.gradients() == module.gradients() == [15.0, 0.5]
    assert type(own.weight) is Marked
    assert own.weight.no_decay
    assert own.bias.owner is own
    assert own.same is own.bias
    assert own.early[0] is own.weight
    own.factor = 1.0
    module.handle.remove()
    assert own.gradients() == [5.0, 0.5]
    assert module.gradients() == [3.0, 0.5]


def test_hooks_of_a_frozen_parameter_are_called_when_it_is_trained() -> None:
    module = Masked().requires_grad_(False)
    own = copied(module)
    old, module.weight = module.weight, nn.Parameter(torch.ones(2), requires_grad=False)
    carry_over(old, module.weight)
    assert own.requires_grad_(True).gradients() == module.requires_grad_(True).gradients() == [15.0, 0.5]


def test_a_replacement_shares_attributes_and_handles() -> None:
    module = Masked()
    old, module.weight = module.weight, nn.Parameter(torch.ones(2))
    carry_over(old, module.weight)
    assert type(module.weight) is Marked
    assert module.gradients() == [15.0, 0.5]
    module.handle.remove()
    assert module.gradients() == [3.0, 0.5]
    old.late = 1
    assert module.weight.late == 1
