"""What the parameters that a stage borrows cost, and where they are put."""

from cProfile import Profile

import torch
from torch import nn

from polyphase.engine.strategies.pipeline.received_values import BorrowedParameters


def modules(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(number)))


def calls_of_a_batch(number: int) -> int:
    """In which all parameters are borrowed."""
    module = modules(number)
    borrowed = BorrowedParameters(module, allowed=True)
    with Profile(subcalls=False, builtins=False) as profile:
        for parameter in list(module.parameters()):
            assert borrowed.name_of(parameter)
            borrowed.put(parameter, torch.zeros(2, 2))
        borrowed.clear()
    return sum(entry.callcount for entry in profile.getstats())


def test_twice_as_many_take_twice_as_many_calls():
    assert calls_of_a_batch(100) <= 2.2 * calls_of_a_batch(50)


def test_a_tied_one_is_replaced_in_all_its_places_until_the_batch_ends():
    module = modules(3)
    module[2].weight = module[0].weight
    shape = module[0].weight
    borrowed = BorrowedParameters(module, allowed=True)
    for _ in range(2):
        lent = borrowed.put(shape, torch.zeros(2, 2))
        assert module[0].weight is module[2].weight is lent is borrowed.lent(shape)
        assert borrowed.name_of(shape) == borrowed.name_of(lent) == "0.weight"
        borrowed.clear()
        assert module[0].weight is module[2].weight is shape
        assert borrowed.lent(shape) is None
