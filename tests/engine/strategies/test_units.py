"""Which blocks are units: the longest list of one class, or what the module says."""

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.units import shard_units


class Block(nn.Module):
    def __init__(self, size: int = 4):
        super().__init__()
        self.linear = nn.Linear(size, size)


class Net(nn.Module):
    """Two lists of blocks, the longer one second, between two other layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.short = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)


class Says(Net):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def shard_units(self):
        return self.units(self)


def same(found, expected):
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_the_units_are_the_longest_list_in_order(container):
    net = Net()
    net.blocks = container([Block() for _ in range(4)])
    assert same(shard_units(net), list(net.blocks))


def test_a_list_may_be_found_at_any_depth():
    net = Net()
    assert same(shard_units(nn.Sequential(nn.Dropout(), net)), list(net.blocks))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),  # not of one class
        nn.ModuleList([Block()]),  # nothing repeats
        nn.Sequential(nn.ReLU(), nn.ReLU()),  # nothing to shard
        nn.ModuleList(),
    ],
)
def test_without_repeated_blocks_there_are_no_units(module):
    assert shard_units(module) == []


def test_a_longer_list_without_parameters_does_not_hide_the_blocks():
    net = Net()
    net.activations = nn.ModuleList(nn.ReLU() for _ in range(10))
    assert same(shard_units(net), list(net.blocks))


class Mixture(nn.Module):
    """A mixture of more experts than `Net` has blocks."""

    def __init__(self, experts: str, router: str):
        super().__init__()
        setattr(self, router, nn.Linear(4, 8))
        setattr(self, experts, nn.ModuleList(nn.Linear(4, 4) for _ in range(8)))


@pytest.mark.parametrize(("experts", "router"), [("experts", "choose"), ("mlps", "gate"), ("branches", "router_0")])
def test_experts_are_no_blocks(experts, router):
    net = Net()
    for block in net.blocks:
        block.mixture = Mixture(experts, router)
    assert same(shard_units(net), list(net.blocks))


def test_blocks_beside_a_gated_mlp_stay_blocks():
    net = Net()
    net.gate_proj = nn.Linear(4, 4)
    assert same(shard_units(net), list(net.blocks))


def test_a_block_tied_to_a_module_outside_is_left_to_the_rest():
    net = Net()
    net.blocks[1].linear.weight = net.short[0].weight
    assert same(shard_units(net), [net.blocks[0], net.blocks[2]])


def test_blocks_tied_to_each_other_are_left_to_the_rest():
    net = Net()
    net.blocks[0].linear.bias = net.blocks[2].linear.bias
    assert same(shard_units(net), [net.blocks[1]])


def test_a_tie_inside_one_block_does_not_matter():
    net = Net()
    for block in net.blocks:
        block.tied = nn.Linear(4, 4)
        block.tied.weight = block.linear.weight
    assert same(shard_units(net), list(net.blocks))


def test_a_module_may_name_its_units_itself():
    net = Says(lambda self: iter([self.embed, self.short]))
    assert same(shard_units(net), [net.embed, net.short])


def test_what_a_module_names_is_still_checked_for_ties():
    net = Says(lambda self: [self.embed, self.blocks[0]])
    net.head.weight = net.embed.weight
    assert same(shard_units(net), [net.blocks[0]])


@pytest.mark.parametrize("units", [lambda self: [nn.Linear(2, 2)], lambda self: [self]], ids=["foreign", "itself"])
def test_a_unit_that_is_no_sub_module_is_refused(units):
    with pytest.raises(ValueError, match=r"Says\.shard_units\(\) returned .*, which is none of its own sub-modules"):
        shard_units(Says(units))


def test_no_parameter_belongs_to_two_units():
    torch.manual_seed(0)
    net = Net()
    net.blocks[0].linear.weight = net.head.weight = net.blocks[1].linear.weight
    owned = [id(p) for unit in shard_units(net) for p in unit.parameters()]
    assert len(owned) == len(set(owned))
