"""Digests of tensors, as ranks compare them."""

import pytest
import torch

from polyphase.engine.distributed.digests import Digests, digests, unequal_replicas, whole


def test_sum_and_norm_of_dense_sparse_complex_and_low_precision_tensors():
    dense = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    tensors = {
        "dense": dense,
        "sparse": dense.to_sparse(),
        "complex": torch.tensor([3.0 - 4.0j]),
        "half": dense.half() * 1e4,  # whose square is no fp16
        "absent": torch.empty(3, device="meta"),
    }
    figures = whole([digests(tensors.items()).on_host()])
    assert figures["dense"] == figures["sparse"] == figures["complex"] == (-1.0, 5.0)
    assert figures["half"] == pytest.approx((-1e4, 5e4))
    assert "absent" not in figures
    assert whole([digests([])]) == {}


def test_shards_are_added_and_replicas_are_not():
    shards = [Digests([("weight", (rank,))], torch.tensor([[1.0, 4.0]]), [8]) for rank in range(4)]
    assert whole([*shards, *shards]) == {"weight": (4.0, 4.0)}


def test_replicas_that_differ_are_named():
    ranks = [digests([("equal", torch.ones(2)), ("weight", torch.ones(4) + 1e-3 * rank)]) for rank in range(3)]
    assert unequal_replicas(ranks, 1e-2) == []
    assert unequal_replicas(ranks[:1] * 3) == []
    [(name, text)] = unequal_replicas(ranks)
    assert (name, text) == ("weight", "norm 2 on rank 0, 2.002 on rank 1")
    turned = [digests([("weight", torch.tensor([sign, 0.0]))]) for sign in (1.0, -1.0)]
    assert unequal_replicas(turned, 1e-5) == [("weight", "sum 1 on rank 0, -1 on rank 1")]
    nan = torch.full((2,), torch.nan)
    assert unequal_replicas([digests([("weight", nan)])] * 2) == []
    assert unequal_replicas([digests([("weight", value)]) for value in (nan, torch.ones(2))])
