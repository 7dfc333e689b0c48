"""The laws of the place in the data: whoever goes on, each sample of an epoch is trained on once, in the same order."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from polyphase.engine.data.epoch_position import EpochPosition, order_of
from polyphase.engine.data.global_order import GlobalOrder

from ..tiny import Positions


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(9)


def drawn(loaders: list[DataLoader]) -> list[list[list[int]]]:
    """The batches of each rank; all of them begin with the same random numbers, as in processes of their own."""
    state, found = torch.get_rng_state(), []
    for loader in loaders:
        torch.set_rng_state(state)
        found.append([batch.tolist() for batch in loader])
    return found


def loaders(
    order: Any, world: int, batch_size: int, *, epoch: int, drop_last: bool, **arguments: Any
) -> list[DataLoader]:
    """The loader of each rank; `order` makes the sampler, or the batch sampler, of a process."""
    made = []
    for rank in range(world):
        inner = order()
        dealt = GlobalOrder(inner, num_replicas=world, rank=rank, drop_last=drop_last)
        dealt.set_epoch(epoch)
        data = Positions(1000)
        if isinstance(inner, BatchSampler):
            made.append(DataLoader(data, batch_sampler=dealt, **arguments))
        else:
            made.append(DataLoader(data, batch_size=batch_size, sampler=dealt, drop_last=drop_last, **arguments))
    return made


def steps(ranks: list[DataLoader]) -> list[list[int]]:
    """The samples of all ranks together, step by step, in the order of their positions."""
    return [
        [i for row in itertools.zip_longest(*step) for i in row if i is not None]
        for step in zip(*drawn(ranks), strict=True)
    ]


def gone_on(order: Any, saved: dict[str, Any], world: int, batch_size: int, **arguments: Any) -> list[DataLoader]:
    ranks = loaders(order, world, batch_size, epoch=0, **arguments)
    for loader in ranks:
        place = EpochPosition.resumed(loader, world, saved)
        whole = world * (1 if isinstance(loader.batch_sampler, GlobalOrder) else batch_size)
        assert place.batches == saved["position"] // whole
        assert len(loader) == place.batches + len(list(loader))
        EpochPosition.resumed(loader, world, saved)  # once more: its first pass is over
    return ranks


@settings(max_examples=60)
@given(
    size=st.integers(1, 50),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_each_sample_once_in_the_epochs_order(size, worlds, batch_sizes, epoch, shuffle, drop_last, data):
    def order():
        return RandomSampler(range(size)) if shuffle else SequentialSampler(range(size))

    first = loaders(order, worlds[0], batch_sizes[0], epoch=epoch, drop_last=drop_last)
    assume(len(first[0]) > 0)  # else no order was drawn, and whoever goes on draws the epoch's
    num_steps = data.draw(st.integers(0, len(first[0])))
    done = [i for step in steps(first)[:num_steps] for i in step]
    whole = order_of(first[0]).passes.latest.up_to(size).tolist()  # type: ignore[union-attr]
    saved = EpochPosition(first[0], worlds[0]).state_dict(epoch, num_steps)
    assert saved["position"] == min(len(done), size)
    rest = [i for step in steps(gone_on(order, saved, worlds[1], batch_sizes[1], drop_last=drop_last)) for i in step]
    together = [*done[:size], *rest]
    if drop_last:
        assert together == whole[: len(together)]
        assert size - len(together) < worlds[1] * batch_sizes[1] or num_steps == len(first[0])
    else:  # filled up by the first samples, as ever, where the ranks need as many
        assert together[:size] == whole
        assert together[size:] == list(itertools.islice(itertools.cycle(whole), len(together) - size))
        assert len(together) - size < max(worlds)


@settings(max_examples=30)
@given(num_batches=st.integers(1, 12), worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)), data=st.data())
def test_of_a_batch_sampler_each_batch_once(num_batches, worlds, data):
    def order():
        return BatchSampler(RandomSampler(range(3 * num_batches)), 3, drop_last=False)

    first = loaders(order, worlds[0], 3, epoch=1, drop_last=False)
    num_steps = data.draw(st.integers(0, len(first[0])))
    done = [batch for step in list(zip(*drawn(first), strict=True))[:num_steps] for batch in step][:num_batches]
    whole = order_of(first[0]).passes.latest.up_to(num_batches)[:]  # type: ignore[union-attr]
    saved = EpochPosition(first[0], worlds[0]).state_dict(1, num_steps)
    rest = [b for step in zip(*drawn(gone_on(order, saved, worlds[1], 3, drop_last=False)), strict=True) for b in step]
    assert [*done, *rest][:num_batches] == whole


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_fetch_ahead(num_workers, persistent):
    def order():
        return RandomSampler(range(20))

    arguments = {"drop_last": False, "num_workers": num_workers, "persistent_workers": persistent}
    (first,) = loaders(order, 1, 2, epoch=2, **arguments)
    whole = [batch.tolist() for batch in first]
    saved = EpochPosition(first, 1).state_dict(2, 3)
    (second,) = loaders(order, 1, 2, epoch=0, **arguments)
    EpochPosition.resumed(second, 1, saved)
    assert [batch.tolist() for batch in second] == whole[3:]
    second.sampler.set_epoch(3)  # type: ignore[attr-defined]
    assert sorted(i for batch in second for i in batch.tolist()) == list(range(20)), "the next epoch is whole again"


class Private(Sampler[int]):
    """Draws from a generator of its own, which nobody can seed from outside."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(4)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(self.draws.permutation(12).tolist())


class Stateful(Private):
    def state_dict(self) -> dict[str, Any]:
        return {"draws": str(self.draws.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.bit_generator.state = eval(state["draws"])


def generated() -> RandomSampler:
    return RandomSampler(range(12), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("order", [Private, Stateful, generated])
def test_samplers_that_remember_their_draws_are_brought_to_the_epoch(order):
    dealt = GlobalOrder(order())
    epochs = []
    for epoch in range(3):
        dealt.set_epoch(epoch)
        epochs.append(list(dealt))
    saved = EpochPosition(DataLoader(Positions(12), batch_size=2, sampler=dealt), 1).state_dict(2, 2)
    (second,) = loaders(order, 1, 2, epoch=0, drop_last=False)
    EpochPosition.resumed(second, 1, saved)
    assert [i for batch in second for i in batch.tolist()] == epochs[2][4:]


def test_another_order_is_refused():
    def order():
        return RandomSampler(range(12))

    (first,) = loaders(order, 1, 2, epoch=0, drop_last=False)
    drawn([first])
    saved = EpochPosition(first, 1).state_dict(0, 3)
    (second,) = loaders(lambda: SequentialSampler(range(12)), 1, 2, epoch=0, drop_last=False)
    with pytest.raises(ValueError, match=r"after 6 of 12 samples .* use the same data, the same seed"):
        EpochPosition.resumed(second, 1, saved)


def test_the_ledger_says_who_was_trained_on_what():
    def order():
        return RandomSampler(range(24))

    (loader,) = loaders(order, 1, 2, epoch=0, drop_last=False)
    drawn([loader])
    saved = EpochPosition(loader, 1).state_dict(0, 3)
    ranks = gone_on(order, saved, 2, 3, drop_last=False)
    again = EpochPosition.resumed(ranks[0], 2, saved).state_dict(0, 3)
    assert again["ledger"] == [{"from": 0, "to": 6, "world_size": 1}, {"from": 6, "to": 18, "world_size": 2}]
    assert again["position"] == 18


def test_a_shorter_loader_beside_a_longer_one_begins_again():
    def order():
        return RandomSampler(range(8))

    (loader,) = loaders(order, 1, 2, epoch=0, drop_last=False)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    place = EpochPosition(loader, 1)
    saved = place.state_dict(0, 6)  # 4 batches an epoch: this is the second time, after 2
    assert (saved["position"], saved["began_again"]) == (4, True)
    assert first != second, "each time it draws another order, as under stock Lightning"
    (resumed,) = loaders(order, 1, 2, epoch=0, drop_last=False)
    EpochPosition.resumed(resumed, 1, saved)
    assert [batch.tolist() for batch in resumed] == second[2:]
    assert sorted(i for batch in resumed for i in batch.tolist()) == list(range(8))
    at_end = place.state_dict(0, 8)
    assert (at_end["position"], at_end["digest"]) == (8, order_of(loader).passes.latest.digest(8))  # type: ignore[union-attr]
