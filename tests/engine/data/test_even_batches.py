"""Laws of what is evaluated: each sample once over all ranks, as many batches on each, in the order of the data set."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from polyphase.engine.data.even_batches import EvalBatchSampler, even_batches_of
from polyphase.engine.data.global_order import GlobalOrder

sizes, ranks, batch_sizes = st.integers(0, 97), st.integers(1, 4), st.integers(1, 40)


def of_all_ranks(sampler, batch_size, num_ranks, **arguments):
    order = GlobalOrder(sampler)
    return [EvalBatchSampler(order, batch_size, num_replicas=num_ranks, rank=r, **arguments) for r in range(num_ranks)]


def dealt(found):
    """The batches in (window, rank) order, those that are no padding."""
    everyones = []
    for batches in found:
        torch.manual_seed(7)  # each rank in a process of its own
        everyones.append(list(batches)[: batches.num_real])
    return [one[i] for i in range(len(found[0])) for one in everyones if i < len(one)]


@given(sizes, ranks, batch_sizes, st.booleans())
def test_each_sample_once_and_in_order(size, num_ranks, batch_size, shuffle):
    sampler = RandomSampler(range(size)) if shuffle and size else SequentialSampler(range(size))
    found = of_all_ranks(sampler, batch_size, num_ranks)
    torch.manual_seed(7)
    expected = list(sampler)
    assert [i for batch in dealt(found) for i in batch] == expected
    assert sorted(expected) == list(range(size))


@given(sizes, ranks, batch_sizes)
def test_all_ranks_have_as_many_batches_and_none_is_empty_or_too_large(size, num_ranks, batch_size):
    found = of_all_ranks(SequentialSampler(range(size)), batch_size, num_ranks)
    lengths = [[len(batch) for batch in batches] for batches in found]
    assert {len(of_rank) for of_rank in lengths} == {len(found[0])} == {-(-size // (num_ranks * batch_size))}
    assert all(1 <= length <= batch_size for of_rank in lengths for length in of_rank)
    # But for the last window all batches are full; in that, they differ by at most one sample.
    assert all(length == batch_size for of_rank in lengths for length in of_rank[:-1])
    if size:
        last = [of_rank[-1] if b.num_real == len(b) else 0 for of_rank, b in zip(lengths, found, strict=True)]
        assert max(last) - min(last) <= 1
        assert last == sorted(last, reverse=True), "rank 0 has a sample if any has"


@given(sizes, ranks, batch_sizes)
def test_padding_batches_are_at_the_end_and_known(size, num_ranks, batch_size):
    found = of_all_ranks(SequentialSampler(range(size)), batch_size, num_ranks)
    num_padding = [len(batches) - batches.num_real for batches in found]
    assert set(num_padding) <= {0, 1}
    assert {batches.has_padding for batches in found} == {any(num_padding)}
    assert {batches.leaves_some_idle for batches in found} == {any(b.num_real == 0 for b in found) and size > 0}
    assert all(list(b)[-1] == [size - 1] for b, n in zip(found, num_padding, strict=True) if n), "that of another rank"


@given(sizes, ranks, batch_sizes)
def test_drop_last_drops_what_one_process_drops(size, num_ranks, batch_size):
    found = of_all_ranks(SequentialSampler(range(size)), batch_size, num_ranks, drop_last=True)
    assert [i for batch in dealt(found) for i in batch] == list(range(size - size % batch_size))


@given(sizes, ranks)
def test_items_without_batches_go_round(size, num_ranks):
    found = of_all_ranks(SequentialSampler(range(size)), None, num_ranks)
    assert dealt(found) == list(range(size))
    assert [list(batches)[: batches.num_real] for batches in found] == [
        list(range(rank, size, num_ranks)) for rank in range(num_ranks)
    ]


def test_each_pass_is_another_permutation():
    (batches,) = of_all_ranks(RandomSampler(range(9)), 3, 1)
    torch.manual_seed(7)
    found = list(batches), list(batches)
    torch.manual_seed(7)
    sampler = RandomSampler(range(9))
    assert [[i for batch in one for i in batch] for one in found] == [list(sampler), list(sampler)]


def test_what_a_loader_yields_is_found():
    batches = EvalBatchSampler(GlobalOrder(SequentialSampler(range(9))), 2)
    assert even_batches_of(DataLoader(range(9), batch_sampler=batches)) is batches
    assert even_batches_of(DataLoader(range(9))) is None
    assert even_batches_of([1, 2]) is None
