"""The laws of global batches, without processes: every rank's sampler is asked in turn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from polyphase.engine.data.global_order import FlattenedBatchSampler, GlobalBatches, GlobalOrder


def dealt(size, num_ranks, batch, micro, drop_last=False, start=0):
    """The micro-batches of each rank."""
    ranks = []
    for rank in range(num_ranks):
        order = GlobalOrder(range(size), num_replicas=num_ranks, rank=rank)
        order.resume(0, start, 0, {"before": {"global": None, "sampler": None}})
        batches = GlobalBatches(order, size=batch, micro_batch_size=micro, drop_last=drop_last)
        ranks.append((batches, list(batches)))
    return ranks


SIZES = st.integers(1, 97)


@given(size=SIZES, num_ranks=st.integers(1, 5), batch=st.integers(5, 40), micro=st.integers(1, 12), drop=st.booleans())
def test_every_step_has_its_samples_whatever_the_number_of_ranks(size, num_ranks, batch, micro, drop):
    ranks = dealt(size, num_ranks, batch, micro, drop)
    per_step = math.ceil(math.ceil(batch / num_ranks) / micro)
    for batches, mine in ranks:
        assert batches.per_step == per_step
        assert len(batches) == len(mine) == len(ranks[0][1])
        assert all(1 <= len(part) <= micro for part in mine)
    steps = []
    for first in range(0, len(ranks[0][1]), per_step):
        of_ranks = [
            [i for at in range(first, min(first + per_step, len(mine))) for i in mine[at][: batches.samples(at).local]]
            for batches, mine in ranks
        ]
        shares = [len(share) for share in of_ranks]
        assert max(shares) - min(shares) <= 1
        steps.append(sorted(i for share in of_ranks for i in share))
    expected = [list(range(size))[at : at + batch] for at in range(0, size, batch)]
    assert steps == [step for step in expected if len(step) == batch or not drop]


@given(size=SIZES, num_ranks=st.integers(1, 5), batch=st.integers(5, 40), micro=st.integers(1, 12))
def test_each_rank_knows_how_much_all_have(size, num_ranks, batch, micro):
    ranks = dealt(size, num_ranks, batch, micro)
    for at in range(len(ranks[0][1])):
        counts = [batches.samples(at) for batches, _ in ranks]
        assert {count.total for count in counts} == {sum(count.local for count in counts)}
        for (_, mine), count in zip(ranks, counts, strict=True):
            assert count.local in (len(mine[at]), 0)
            assert count.local or len(mine[at]) == 1  # a filler


@given(
    size=SIZES, num_ranks=st.integers(1, 5), batch=st.integers(5, 40), micro=st.integers(1, 12), steps=st.integers(0, 9)
)
def test_it_goes_on_where_others_stopped(size, num_ranks, batch, micro, steps):
    start = min(size, steps * batch)
    whole, rest = dealt(size, num_ranks, batch, micro), dealt(size, num_ranks, batch, micro, start=start)
    for (batches, mine), (resumed, theirs) in zip(whole, rest, strict=True):
        done = batches.num_batches(start)
        assert theirs == mine[done:]
        resumed.sampler.count_done(done)
        assert len(resumed) == len(mine)
        counts = [batches.samples(at) for at in range(done, len(mine))]
        for count in (resumed.samples, resumed.counter(), batches.counter()):
            assert [count(at) for at in range(done, len(mine))] == counts


def test_another_batch_size_in_mid_run_is_refused_by_name():
    batches = GlobalBatches(GlobalOrder(range(8), num_replicas=2), size=4, micro_batch_size=2)
    batches.batch_size = 2
    with pytest.raises(ValueError, match=r"batch_sampler.batch_size = 4: .* their size, 2, can't change"):
        batches.batch_size = 4


def test_what_is_drawn_for_its_length_leaves_the_generators_as_they_were():
    row = FlattenedBatchSampler(BatchSampler(RandomSampler(range(6)), 3, False), 3)
    torch.manual_seed(1)
    assert len(row) == 6
    found = list(row)
    torch.manual_seed(1)
    assert found == list(RandomSampler(range(6)))


def test_batches_of_the_users_stay_together_where_they_fit():
    batches = [[0, 9], [8, 1, 2, 3], [7, 6, 5, 4]]
    assert list(FlattenedBatchSampler(batches, 6)) == [0, 9, 8, 1, 2, 3, 7, 6, 5, 4]
    assert len(FlattenedBatchSampler(batches, 6)) == 10


@pytest.mark.parametrize("size", [4, 5, 7])
def test_a_global_batch_that_ends_within_one_of_them_is_refused(size):
    row = FlattenedBatchSampler(BatchSampler(SequentialSampler(range(12)), 3, False), size)
    with pytest.raises(ValueError, match=f"global_batch_size={size} would end within a batch of BatchSampler"):
        list(row)
