"""What had not been sent, dealt to other ranks: averages over the replicas are applied, so their mean is owed."""

import pytest
import torch

from polyphase.engine.compression import reshard_residuals

SHAPES = {"a": torch.Size([3, 2]), "b": torch.Size([])}


def dealt(saved, saved_shards, shards, ranks):
    return [
        reshard_residuals(saved, SHAPES, saved_shards=saved_shards, shards=shards, rank=rank) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_an_update_of_one_is_owed_on_any_number_of_ranks(ranks):
    saved = [{"a": torch.full((6,), value), "b": torch.ones(1)} for value in (0.0, 0.0, 1.0, 3.0)]
    for residuals in dealt(saved, 1, 1, ranks):
        assert torch.equal(residuals["a"], torch.ones(6))
        assert torch.equal(residuals["b"], torch.ones(1))


def test_shards_are_joined_and_cut_anew():
    rows = torch.arange(8.0)  # the last two fill up the third row
    saved = [{"a": (rows + lift)[part]} for lift in (0, 2) for part in (slice(0, 4), slice(4, 8))]
    (whole,) = dealt(saved, 2, 1, 1)
    assert torch.equal(whole["a"], rows[:6] + 1)
    shards = dealt([whole], 1, 2, 4)
    assert [shard["a"].tolist() for shard in shards] == [[1, 2, 3, 4], [5, 6, 0, 0]] * 2


def test_a_replica_that_has_none_owes_none():
    (residuals,) = dealt([{"a": torch.full((6,), 2.0), "gone": torch.ones(1)}, {}], 1, 1, 1)
    assert residuals.keys() == {"a"}
    assert torch.equal(residuals["a"], torch.ones(6))
