"""The laws of the order of samples: W ranks see together, step by step, what one process sees."""

import itertools
import tracemalloc
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from polyphase.engine.data.drawing import DrawnOrder, OrderRecord
from polyphase.engine.data.global_order import GlobalOrder
from tests.pairs import nightly

WORLDS = [1, 2, 3, 4]
SIZES = [0, 1, 3, 8, 12, 13]
SAMPLERS = {
    "in order": lambda size: SequentialSampler(range(size)),
    "shuffled": lambda size: RandomSampler(range(max(size, 1)), num_samples=size) if size else SequentialSampler([]),
    "subset": lambda size: SubsetRandomSampler(range(0, size, 2)),
    "weighted": lambda size: WeightedRandomSampler([1.0] * size, size) if size else SequentialSampler([]),
    "a list": lambda size: [size - 1 - i for i in range(size)],
}


def ranks(sampler, world: int, *, epoch: int = 0, drop_last: bool = False) -> list[list[int]]:
    """What each rank is dealt; each one begins with the same random numbers, as in a process of its own."""
    dealt = []
    generator = getattr(sampler, "generator", None)
    states = torch.get_rng_state(), generator and generator.get_state()
    for rank in range(world):
        torch.set_rng_state(states[0])
        if generator is not None:
            generator.set_state(states[1])
        order = GlobalOrder(sampler, num_replicas=world, rank=rank, drop_last=drop_last)
        order.set_epoch(epoch)
        dealt.append(list(order))
        assert len(dealt[-1]) == len(order)
    return dealt


def whole(sampler, **arguments) -> list[int]:
    return ranks(sampler, 1, **arguments)[0]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(5)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_ranks_together_train_on_the_batches_of_one_process(name, world, size, micro_batch):
    sampler = SAMPLERS[name](size)
    expected = list(BatchSampler(list(sampler), world * micro_batch, drop_last=True))
    torch.manual_seed(5)
    steps = [list(BatchSampler(part, micro_batch, drop_last=True)) for part in ranks(sampler, world, drop_last=True)]
    together = [Counter(itertools.chain(*step)) for step in zip(*steps, strict=True)]
    assert together == [Counter(batch) for batch in expected]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_without_drop_last_only_the_last_round_is_filled_by_the_first_samples_again(name, world, size):
    sampler = SAMPLERS[name](size)
    order = list(sampler)
    torch.manual_seed(5)
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


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_each_pass_draws_what_the_sampler_itself_would_have_drawn(name):
    """From the generator that it would have drawn from, which is left as that leaves it."""
    order = GlobalOrder(SAMPLERS[name](12))
    found = [list(order) for _ in range(3)], torch.get_rng_state()
    torch.manual_seed(5)
    sampler = SAMPLERS[name](12)
    assert found[0] == [list(sampler) for _ in range(3)]
    assert torch.equal(found[1], torch.get_rng_state())


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_a_rank_draws_with_rank_0s_numbers_and_keeps_its_own(name):
    expected = list(SAMPLERS[name](12))[1::2]
    torch.manual_seed(5)
    rank_0s: list[Any] = []
    list(GlobalOrder(SAMPLERS[name](12), num_replicas=2, broadcast=lambda state: rank_0s.append(state) or state))
    torch.manual_seed(6)
    own = torch.get_rng_state()
    other = GlobalOrder(SAMPLERS[name](12), num_replicas=2, rank=1, broadcast=lambda state: rank_0s[0])
    assert list(other) == expected
    assert torch.equal(torch.get_rng_state(), own)


def test_the_attributes_of_the_users_sampler_are_there():
    order = GlobalOrder(WeightedRandomSampler([1.0, 3.0], 4), num_replicas=2)
    assert order.weights.tolist() == [1.0, 3.0]
    assert isinstance(order, DistributedSamplerWrapper)
    assert order.dataset._sampler is order.sampler  # where Lightning has it
    with pytest.raises(AttributeError, match="no_such"):
        order.no_such  # noqa: B018


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
        assert whole(found, epoch=epoch) == list(expected)


def test_sampling_with_replacement_is_dealt_like_anything_else():
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], num_samples=12)
    parts = ranks(sampler, 3)
    assert {i for part in parts for i in part} == {1, 3}
    torch.manual_seed(5)
    assert [i for round_ in zip(*parts, strict=True) for i in round_] == list(sampler)


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


@pytest.mark.parametrize("num_samples", [3, 10, 20, 24])
@pytest.mark.parametrize("is_users", [False, True])
def test_a_shuffled_order_and_the_generators_after_it_are_torchs(num_samples, is_users):
    generator = torch.Generator().manual_seed(9) if is_users else None
    sampler = RandomSampler(range(10), num_samples=num_samples, generator=generator)
    expected = [*sampler, *sampler], torch.get_rng_state(), generator and generator.get_state()
    torch.manual_seed(5)
    if generator is not None:
        generator.manual_seed(9)
    order = GlobalOrder(sampler)
    passes = []
    for epoch in range(2):
        order.set_epoch(epoch)
        passes += order
    assert passes == expected[0]
    assert all(type(index) is int for index in passes)
    assert torch.equal(torch.get_rng_state(), expected[1])
    assert generator is None or torch.equal(generator.get_state(), expected[2])


class Yields:
    """A sampler of the user's."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 200_000

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


LONG = {
    "shuffled": RandomSampler(range(200_000)),
    "in order": SequentialSampler(range(200_000)),
    "NumPy's integers": Yields(lambda: np.random.default_rng(0).permutation(200_000)),
    "tensors": Yields(lambda: map(torch.tensor, range(200_000))),
    "batches": BatchSampler(SequentialSampler(range(800_000)), 4, False),
}
ODD = {
    "lists of NumPy's integers": lambda: [list(np.arange(3)), list(np.arange(2))],
    "numbers of several types": lambda: [*range(3), *np.arange(2), *torch.arange(2)],
    "lists and numbers": lambda: [[0, 1], 2, [3]],
    "lists of unlike numbers": lambda: [[0, 1], [np.int64(2), 3], []],
    "tuples": lambda: [(0, 1), (2, 3)],
    "large numbers": lambda: list(np.arange(3, dtype=np.uint64) + 2**63),
    "tensors of other types": lambda: list(torch.arange(3, dtype=torch.int32)),
    "small integers of NumPy's": lambda: list(np.arange(3, dtype=np.int8)),
    "flags": lambda: [True, False],
}


class Asked:
    """A data set that counts how often a sampler asks for its length, which it does in each pass."""

    num_asked = 0

    def __len__(self) -> int:
        self.num_asked += 1
        return 12


@pytest.mark.parametrize("is_users", [False, True])
def test_the_passes_of_earlier_epochs_are_not_drawn_again(is_users):
    def order() -> tuple[GlobalOrder, Asked]:
        generator = torch.Generator().manual_seed(9) if is_users else None
        data = Asked()
        return GlobalOrder(RandomSampler(data, generator=generator)), data  # type: ignore[arg-type]

    first, _ = order()
    for epoch in range(40):
        first.set_epoch(epoch)
        whole = list(first)
    counts = []
    for epoch in (0, 39):
        resumed, data = order()
        before = data.num_asked
        resumed.resume(epoch, 6, 6, {**first.state(39, 0), "num_passes": epoch})
        assert list(resumed) == whole[6:]
        counts.append(data.num_asked - before)
    assert counts[0] == counts[1]


def test_a_permutation_of_four_bytes_a_number_is_torchs_and_has_the_digest_of_eight():
    size = 40_000  # more than a block
    drawing = DrawnOrder(RandomSampler(range(size), generator=torch.Generator().manual_seed(3)))
    expected = torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist()
    found = drawing.up_to(size)
    assert list(found) == expected
    assert found.itemsize == 4
    for position in (1, 20_000, size):
        assert drawing.digest(position) == zlib.crc32(memoryview(array("q", expected[:position])))


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_an_order_is_read_as_it_was_yielded(make):
    expected, found = make(), OrderRecord()
    for item in expected:
        found.add([item])
    assert [*found.order] == expected == found.order[:]
    assert [found.order[i] for i in range(len(expected))] == expected
    assert repr([*found.order]) == repr(expected), "of the same types"
    assert found.digest(len(expected)) == zlib.crc32("".join(map(repr, expected)).encode())


@pytest.mark.parametrize("name", [*(name for name in LONG if name != "tensors"), *nightly("tensors")])
def test_a_long_order_takes_no_more_than_its_numbers(name):
    sampler = LONG[name]
    order = GlobalOrder(sampler, num_replicas=2)
    order.begin().take(1)
    tracemalloc.start()
    order.set_epoch(1)
    order.begin().up_to(180_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = 200_000 * getattr(sampler, "batch_size", 1)
    assert peak_bytes < 3 * 8 * size, "a list of Python integers has 40 bytes each"
