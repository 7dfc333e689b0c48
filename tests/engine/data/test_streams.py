"""Streams that several ranks read: their parts, and their common end."""

import math

import pytest
from torch.utils.data import DataLoader

from polyphase.engine.data import agreeing, shard_of

from ..tiny import Stream


def said(*others):
    """What the ranks say at each batch: this one first, then `others`, by their numbers of batches."""
    asked = iter(range(100))

    def agree(mine):
        at = next(asked)
        return [mine, *(at < number for number in others)]

    return agree


def test_a_stream_goes_on_until_no_rank_has_a_batch():
    loader = agreeing(DataLoader(Stream(5), batch_size=2), said(5, 1), None)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [4], [4]]
    assert loader.num_real == 3


def test_none_of_a_streams_batches_is_a_ghost_while_there_are_more():
    loader = agreeing(DataLoader(Stream(4), batch_size=2), said(1), None)
    batches = iter(loader)
    next(batches)
    assert loader.num_real == math.inf
    assert [batch.tolist() for batch in batches] == [[2, 3]]


def test_streams_that_are_empty_on_all_ranks():
    assert list(agreeing(DataLoader(Stream(0)), said(0), None)) == []


@pytest.mark.parametrize(("mine", "other", "lacks"), [(0, 1, 0), (1, 0, 1)])
def test_a_rank_without_any_batch_is_named_on_all_ranks(mine, other, lacks):
    with pytest.raises(ValueError, match=rf"\(Stream\) has no batch at all on rank\(s\) \[{lacks}\] of 2"):
        list(agreeing(DataLoader(Stream(mine)), said(other), None))


def test_the_length_is_that_of_all_ranks():
    assert len(agreeing(DataLoader(Stream(4)), said(), 7)) == 7
    with pytest.raises(TypeError, match="has no length on every rank"):
        len(agreeing(DataLoader(Stream(4)), said(), None))


def test_a_data_set_that_cannot_be_sharded():
    assert shard_of(DataLoader(Stream(4)), 2, 0) is None


class Sharded(Stream):
    num_shards = 2

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.size // num_shards)


def test_fewer_shards_than_ranks_are_refused():
    part = shard_of(DataLoader(Sharded(4), batch_size=None), 2, 0)
    assert part is not None
    assert list(part) == [0, 1]
    with pytest.raises(ValueError, match=r"Sharded has 2 shard\(s\), which 3 ranks can't share: give it as many"):
        shard_of(DataLoader(Sharded(4)), 3, 0)


def test_a_data_set_of_a_package_that_shards_itself_is_left_as_it_is():
    cls = type("StreamingDataset", (Stream,), {"__module__": "litdata.streaming.dataset"})
    loader = DataLoader(cls(4))
    assert shard_of(loader, 2, 0) is loader
