"""Where a module is cut: balanced runs of blocks, everything else beside the blocks it was registered with."""

import random
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from polyphase.engine.strategies.pipeline.plan import RemoteTensor, plan_stages, replace_absent


class Net(nn.Module):
    def __init__(self, sizes=(4, 4, 4, 4)):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.embed = nn.Embedding(8, 4)
        self.accuracy = MulticlassAccuracy(3)
        self.body = nn.Module()
        self.body.bias = nn.Parameter(torch.zeros(1))
        self.body.blocks = nn.ModuleList(nn.Linear(size, size) for size in sizes)
        self.body.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)


class Says(Net):
    def __init__(self, stages):
        super().__init__()
        self.stages = stages

    def pipeline_stages(self):
        return self.stages(self)


def names(module, plan):
    known = {part: name for name, part in module.named_modules() if not isinstance(part, MulticlassAccuracy)}
    return [[known[unit] for unit in stage] for stage in plan.stages]


def held(module, plan):
    return {name: plan.holders[parameter] for name, parameter in module.named_parameters()}


def test_blocks_are_dealt_by_their_parameters():
    net = Net(sizes=(40, 4, 4, 4, 4))
    plan = plan_stages(net, 2)
    assert names(net, plan) == [["body.blocks.0"], [f"body.blocks.{i}" for i in range(1, 5)]]


@pytest.mark.parametrize("seed", range(8))
def test_no_other_cut_has_a_smaller_sum_of_squares(seed):
    def cost(lengths: Sequence[int]) -> int:
        ends = [0, *accumulate(lengths)]
        return sum(sum(counts[begin:end]) ** 2 for begin, end in pairwise(ends))

    sizes = random.Random(seed).choices([1, 2, 3, 8, 30], k=9)
    module, counts = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes)), [1 + size for size in sizes]
    for num_stages in range(1, 6):
        cuts = ([0, *cut, 9] for cut in combinations(range(1, 9), num_stages - 1))
        least = min(cost([end - begin for begin, end in pairwise(cut)]) for cut in cuts)
        assert cost(list(map(len, plan_stages(module, num_stages).stages))) == least


def test_of_two_lists_that_are_as_long_the_trained_one_is_cut():
    net = Net()
    net.teacher = nn.ModuleList(nn.Linear(4, 4) for _ in net.body.blocks).requires_grad_(False)
    plan = plan_stages(net, 2)
    assert [name for stage in names(net, plan) for name in stage] == [f"body.blocks.{i}" for i in range(4)]


def test_what_lies_outside_counts_and_belongs_to_its_neighbours():
    net = Net()
    net.embed = nn.Embedding(1000, 4)
    plan = plan_stages(net, 2)
    assert names(net, plan) == [["body.blocks.0"], ["body.blocks.1", "body.blocks.2", "body.blocks.3"]]
    found = held(net, plan)
    assert found["embed.weight"] == found["body.blocks.0.bias"] == (0,)
    assert found["head.weight"] == found["body.norm.weight"] == (1,)
    assert found["token"] == found["body.bias"] == (0, 1)  # of modules around the blocks


def test_tied_parameters_are_held_where_they_are_used():
    net = Net()
    net.head.weight = net.embed.weight
    net.body.blocks[1].bias = net.body.blocks[0].bias
    found = held(net, plan_stages(net, 4))
    assert found["embed.weight"] == (0, 3)
    assert found["body.blocks.0.bias"] == (0, 1)


def test_a_sequential_is_cut_where_nothing_repeats():
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    assert names(net, plan_stages(net, 2)) == [["0"], ["1", "2", "3", "4"]]
    assert [len(stage) for stage in plan_stages(net, 5).stages] == [1] * 5


def test_a_module_may_say_it_itself():
    net = Says(lambda net: [[net.embed, net.body.blocks[0]], [*net.body.blocks[1:], net.head]])
    plan = plan_stages(net, 2)
    assert names(net, plan)[0] == ["embed", "body.blocks.0"]
    assert held(net, plan)["body.norm.weight"] == (1,)


def test_what_others_hold_is_left_behind_as_a_shape():
    net = Net()
    net.head.weight = net.embed.weight
    net.head.weight.mark = "mine"
    plan = plan_stages(net, 2)
    before = [name for name, _ in net.named_parameters()]
    replace_absent(net, plan, [net.embed.weight])
    assert isinstance(net.embed.weight, RemoteTensor)
    assert net.embed.weight is net.head.weight
    assert net.embed.weight.mark == "mine"
    assert net.embed.weight.shape == (8, 4)
    assert [name for name, _ in net.named_parameters()] == before
    assert plan.holders[net.embed.weight] == (0, 1)


@pytest.mark.parametrize(
    ("module", "num_stages", "message"),
    [
        (Net(), 5, r"Net can't be cut into 5 stages: its longest list of blocks, 'body.blocks', has 4. .*at most 4"),
        (
            nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)] * 3)}),
            2,
            "the blocks 'blocks' of ModuleDict are one module, 3 times, .* choose another strategy, such as 'fsdp'",
        ),
        (nn.Linear(2, 2), 2, r"Linear has no repeated blocks.*a method pipeline_stages\(\)"),
        (
            Says(lambda net: [net.body.blocks]),
            2,
            r"Says.pipeline_stages\(\) returned lists of \[4\] sub-modules",
        ),
        (Says(lambda net: [[], net.body.blocks]), 2, r"lists of \[0, 4\] sub-modules"),
        (Says(lambda net: [[net.embed], [nn.Linear(2, 2)]]), 2, r"returned Linear, which is none of its own"),
        (Says(lambda net: [[net.embed], [net.embed]]), 2, r"a sub-module twice, or one that is inside of another"),
        (Says(lambda net: [[net.body.norm], [net.body]]), 2, r"a sub-module twice, or one that is inside of another"),
    ],
)
def test_what_can_not_be_cut_is_an_error(module, num_stages, message):
    with pytest.raises(ValueError, match=message):
        plan_stages(module, num_stages)
