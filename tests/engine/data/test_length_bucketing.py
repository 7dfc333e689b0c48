"""Batches of like length: the laws of `LengthBucketing`, and what is padded and waited for when ranks share batches."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from polyphase.engine.data import LengthBucketing
from polyphase.engine.data.global_order import GlobalOrder

from ..tiny import Positions
from .runs import assert_goes_on, train

LENGTHS = torch.empty(20_000).log_normal_(5, 0.7, generator=torch.Generator().manual_seed(0)).long().clamp(8, 4096)
SMALL = [3, 9, 1, 4, 4, 8, 2, 2, 5, 7, 4, 1, 6, 3, 4, 2]


class Sorted(Sampler[list[int]]):
    """A user's: batches of 16 of like length, in random order, `group` neighbours at a time."""

    def __init__(self, group: int) -> None:
        self.group = group

    def __len__(self) -> int:
        return len(LENGTHS) // 16

    def __iter__(self) -> Iterator[list[int]]:
        batches = LENGTHS.argsort().view(-1, self.group, 16)
        drawn = torch.randperm(len(batches), generator=torch.Generator().manual_seed(1))
        yield from batches[drawn].flatten(0, 1).tolist()


def padded(batch: list[int]) -> int:
    return len(batch) * int(LENGTHS[batch].max())


def steps_of(batches: Any, world: int) -> list[tuple[list[int], ...]]:
    """The batches of each step, of all ranks."""
    ranks = [GlobalOrder(batches, num_replicas=world, rank=rank, drop_last=True) for rank in range(world)]
    return list(zip(*ranks, strict=True))


def useful_share(steps: list[tuple[list[int], ...]]) -> float:
    """Tokens over those that all ranks could have done in the time of the step's longest."""
    tokens = sum(int(LENGTHS[batch].sum()) for step in steps for batch in step)
    return tokens / sum(len(step) * max(map(padded, step)) for step in steps)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_hardly_pad_or_wait(world):
    steps = steps_of(LengthBucketing(LENGTHS, 8192), world)
    assert useful_share(steps) >= 0.97
    costs = [[padded(batch) for batch in step] for step in steps]
    skew = sum(max(cost) - sum(cost) / world for cost in costs) / sum(sum(cost) / world for cost in costs)
    assert skew < 0.03


@pytest.mark.parametrize("world", [1, 2, 5])
def test_batches_of_a_users_sampler_go_to_the_ranks_as_neighbours(world):
    steps = steps_of(Sorted(10), world)
    assert [batch for step in steps for batch in step] == list(Sorted(10)), "in the order of one process"
    assert useful_share(steps) >= 0.95
    if world > 1:
        assert useful_share(steps_of(Sorted(1), world)) < 0.8, "a sampler whose neighbours differ makes ranks wait"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_once_in_batches_of_so_many_tokens(shuffle, drop_last):
    batches = LengthBucketing(SMALL, 16, shuffle=shuffle, drop_last=drop_last, group=2)
    epochs = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        epochs.append(list(batches))
        assert epochs[-1] == list(batches), "the epoch alone says"
        assert len(epochs[-1]) == len(batches)
        assert all(len(batch) * max(SMALL[i] for i in batch) <= 16 for batch in epochs[-1])
    samples = [sorted(itertools.chain(*batches)) for batches in epochs]
    assert all(len(set(found)) == len(found) for found in samples)
    assert len(samples[0]) == (14 if drop_last else 16)
    assert (epochs[0] == epochs[1]) is not shuffle
    if shuffle:
        assert list(LengthBucketing(SMALL, 16, seed=1)) != list(LengthBucketing(SMALL, 16))


def test_a_batch_has_as_many_as_the_longest_leaves_room_for():
    assert list(LengthBucketing([2, 5, 3, 5, 1], 10, shuffle=False)) == [[1, 3], [2, 0, 4]]


@pytest.mark.parametrize("lengths", [[3, 0], [3, 11, 12]])
def test_says_which_sample_has_no_room(lengths):
    with pytest.raises(ValueError, match=r"lengths\[1\] = \d+, .* must have 1 to max_tokens=10 tokens"):
        LengthBucketing(lengths, 10)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"max_tokens": 16, "group": 0}])
def test_refuses_no_number(wrong):
    with pytest.raises(ValueError, match=r"must be a whole number of at least 1"):
        LengthBucketing(SMALL, **wrong)


def loader() -> DataLoader:
    return DataLoader(Positions(len(SMALL)), batch_sampler=LengthBucketing(SMALL, 16, group=2))


def test_each_epoch_of_a_run_is_that_of_the_sampler():
    batches, expected = LengthBucketing(SMALL, 16, group=2), []
    for epoch in range(3):
        batches.set_epoch(epoch)
        expected += list(batches)
    assert [sorted(batch) for _, _, batch in train(loader)] == [sorted(batch) for batch in expected]


@pytest.mark.parametrize("at", [2, 7, 9])
def test_goes_on_where_it_was(at, tmp_path):
    assert_goes_on(loader, tmp_path, at)
