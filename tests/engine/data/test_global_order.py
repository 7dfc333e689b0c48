"""The laws of the order of samples: W ranks see together, step by step, what one process sees."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from polyphase.engine.data import GlobalOrder

WORLDS = [1, 2, 3, 4]
SIZES = [0, 1, 3, 8, 12, 13]
SAMPLERS = {
    "in order": lambda size: SequentialSampler(range(size)),
    "shuffled": lambda size: RandomSampler(range(max(size, 1)), num_samples=size) if size else SequentialSampler([]),
    "subset": lambda size: SubsetRandomSampler(range(0, size, 2)),
    "weighted": lambda size: WeightedRandomSampler([1.0] * size, size) if size else SequentialSampler([]),
    "a list": lambda size: [size - 1 - i for i in range(size)],
}


def ranks(sampler, world: int, *, epoch: int = 0, seed: int = 5, drop_last: bool = False) -> list[list[int]]:
    """What each rank is dealt; every rank has an object of its own, as in a process of its own."""
    dealt = []
    for rank in range(world):
        order = GlobalOrder(sampler, num_replicas=world, rank=rank, seed=seed, drop_last=drop_last)
        order.set_epoch(epoch)
        dealt.append(list(order))
        assert len(dealt[-1]) == len(order)
    return dealt


def whole(sampler, **arguments) -> list[int]:
    return ranks(sampler, 1, **arguments)[0]


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_ranks_together_train_on_the_batches_of_one_process(name, world, size, micro_batch):
    sampler = SAMPLERS[name](size)
    expected = list(BatchSampler(whole(sampler), world * micro_batch, drop_last=True))
    steps = [list(BatchSampler(part, micro_batch, drop_last=True)) for part in ranks(sampler, world, drop_last=True)]
    together = [Counter(itertools.chain(*step)) for step in zip(*steps, strict=True)]
    assert together == [Counter(batch) for batch in expected]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_without_drop_last_only_the_last_round_is_filled_by_the_first_samples_again(name, world, size):
    sampler = SAMPLERS[name](size)
    order = whole(sampler)
    together = [i for round_ in zip(*ranks(sampler, world), strict=True) for i in round_]
    assert together[: len(order)] == order
    missing = -len(order) % world
    assert together[len(order) :] == list(itertools.islice(itertools.cycle(order), missing) if order else [])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_drop_last_leaves_out_what_fills_no_round(world, size):
    sampler = SequentialSampler(range(size))
    together = [i for round_ in zip(*ranks(sampler, world, drop_last=True), strict=True) for i in round_]
    assert together == list(range(size - size % world))


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_order_that_is_not_random_is_the_same_in_each_epoch(epoch):
    assert whole(SequentialSampler(range(9)), epoch=epoch) == list(range(9))


@pytest.mark.parametrize("world", WORLDS)
def test_each_epoch_of_a_shuffled_loader_is_another_permutation(world):
    sampler = RandomSampler(range(24))
    epochs = [tuple(i for part in ranks(sampler, world, epoch=e) for i in part) for e in range(5)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_an_epochs_permutation_depends_on_seed_and_epoch_alone():
    orders = {(s, e): tuple(whole(RandomSampler(range(24)), seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(set(orders.values())) == 16, "no two pairs share one"
    for (seed, epoch), order in orders.items():
        torch.rand(3)  # the state of the global generator has no part in it
        assert tuple(whole(RandomSampler(range(24)), seed=seed, epoch=epoch)) == order


def test_iterating_twice_gives_the_same_epoch():
    order = GlobalOrder(RandomSampler(range(24)), seed=3)
    assert list(order) == list(order)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1])
def test_any_seed_of_torchs_will_do(seed):
    assert sorted(whole(RandomSampler(range(8)), seed=seed)) == list(range(8))


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_global_generator_is_left_as_it_was(name):
    state = torch.get_rng_state()
    ranks(SAMPLERS[name](12), 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: RandomSampler(range(24), generator=g),
        lambda g: WeightedRandomSampler([1.0, 2.0, 3.0] * 8, 24, generator=g),
        lambda g: SubsetRandomSampler(range(24), generator=g),
    ],
    ids=["random", "weighted", "subset"],
)
def test_a_generator_of_the_users_is_the_one_that_draws(make):
    expected = make(torch.Generator().manual_seed(42))
    found = make(torch.Generator().manual_seed(42))
    for epoch in range(3):
        assert whole(found, epoch=epoch, seed=epoch) == list(expected)


def test_sampling_with_replacement_is_dealt_like_anything_else():
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], num_samples=12)
    parts = ranks(sampler, 3)
    assert {i for part in parts for i in part} == {1, 3}
    assert [i for round_ in zip(*parts, strict=True) for i in round_] == whole(sampler)


def test_the_epoch_reaches_a_sampler_that_wants_it():
    class ByEpoch(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 3

        def __iter__(self):
            return iter([self.epoch] * 3)

    assert whole(ByEpoch(), epoch=4) == [4, 4, 4]


@pytest.mark.parametrize("world", [1, 2])
def test_a_sampler_without_a_length_is_refused_by_name(world):
    class Endless(Sampler[int]):
        def __iter__(self):
            return iter(range(6))

    with pytest.raises(TypeError, match="Endless"):
        ranks(Endless(), world)
