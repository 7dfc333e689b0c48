"""The copy that the first steps are repeated with has all of the module's program, and nothing of the module itself."""

import functools

import torch
from torch import nn

from polyphase.engine.attachments import has_hooks
from polyphase.engine.loop.module_copy import Memory, copy_whole, fill_copy
from tests.zoo.model import Zoo


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


class Program(Zoo):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layer.weight = Marked(torch.ones(4, 4))
        self.layer.weight.rate = 0.5
        self.layer.weight.beside = self.head.weight
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 0.0, 0.0]))
        self.slow = [self.layer.weight, {"of": self.head}]
        self.seen = []
        self.layer.weight.register_hook(lambda gradient: gradient * self.mask)
        self.head.weight.register_hook(functools.partial(self.scale, 3.0))
        self.head.bias.register_post_accumulate_grad_hook(self.note)
        seen = self.seen
        self.layer.register_forward_hook(lambda module, inputs, output: seen.append(module))

    def scale(self, factor, gradient):
        return factor * gradient

    def note(self, parameter):
        self.seen.append(parameter)

    def forward(self, x):
        return self.head(self.layer(x))


def test_what_hangs_on_parameters_and_functions_that_refer_to_the_module_are_those_of_the_copy():
    module = Program()
    own = copy_whole(module)
    weight = own.layer.weight
    assert type(weight) is Marked
    assert weight is not module.layer.weight
    assert (weight.rate, weight.beside) == (0.5, own.head.weight)
    assert own.slow[0] is weight
    assert own.slow[1]["of"] is own.head
    assert has_hooks(own.parameters())
    own.mask.fill_(2.0)
    own(torch.ones(1, 4)).sum().backward()
    module(torch.ones(1, 4)).sum().backward()
    assert module.seen[0] is module.layer
    assert own.seen[0] is own.layer
    assert [part is own.head.bias for part in own.seen[1:]] == [True]
    assert [part is module.head.bias for part in module.seen[1:]] == [True]
    assert weight.grad.ne(0).all()  # by the mask of the copy
    assert module.layer.weight.grad[:, 1:].eq(0).all()
    torch.testing.assert_close(own.head.weight.grad, module.head.weight.grad)


def test_what_is_shared_stays_the_same_object():
    module = Program()
    module.beside = shared = object()
    assert copy_whole(module, shared).beside is shared


def test_the_copy_gets_what_hooks_have_set_meanwhile():
    module = Program()
    own = copy_whole(module)
    module.seen.append("a batch")
    module.level = 3
    module.register_buffer("count", torch.tensor(7.0), persistent=False)
    own.register_buffer("count", torch.tensor(0.0), persistent=False)
    module.head.bias.requires_grad_(False)
    module.head.eval()
    with torch.no_grad():
        module.layer.weight.fill_(0.25)
    fill_copy(own, module, module.state_dict(), shares_buffers=True)
    assert (own.seen, own.level, float(own.count)) == (["a batch"], 3, 7.0)
    assert not own.head.bias.requires_grad
    assert not own.head.training
    assert own.layer.weight.eq(0.25).all()
    assert own.slow[0] is own.layer.weight
    own.layer(torch.ones(1, 4))
    assert own.seen[-1] is own.layer


def test_each_rank_has_a_memory_of_its_own():
    module = Program()
    module.count, module.queue = 0, torch.zeros(2)
    memories = [Memory(module) for _ in range(2)]
    for step in range(2):
        for rank, memory in enumerate(memories):
            memory.recall(module)
            assert module.count == step
            assert module.seen == [rank] * step
            module.count += 1
            module.seen.append(rank)
            module.queue.add_(rank)
            memory.keep(module)
    memories[1].recall(module)
    assert module.queue.tolist() == [2.0, 2.0]
    memories[0].recall(module)
    assert module.queue.tolist() == [0.0, 0.0]
