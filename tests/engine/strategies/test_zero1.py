"""Which rank steps with which parameter."""

import pytest
import torch
from torch import nn

from polyphase.engine.distributed.buckets import flatten, in_buckets, unflatten
from polyphase.engine.strategies.zero1 import _Owners
from polyphase.models import ByteGPT


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shares_are_even(num_ranks):
    parameters = list(ByteGPT(num_layers=4, dim=64).parameters())
    owners = _Owners(num_ranks)
    owners.assign(parameters)
    shares = [sum(p.numel() for p in parameters if owners[p] == rank) for rank in range(num_ranks)]
    total = sum(p.numel() for p in parameters)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= max(p.numel() for p in parameters)


def test_what_comes_later_changes_no_owner():
    first, second = nn.Linear(8, 8), nn.Linear(16, 16)
    owners = _Owners(2)
    owners.assign(list(first.parameters()))
    before = [owners[p] for p in first.parameters()]
    assert second.weight not in owners
    owners.assign([*second.parameters(), *first.parameters()])
    assert [owners[p] for p in first.parameters()] == before == [0, 1]
    assert owners[second.weight] == 1  # which has eight values so far


def test_buckets_are_of_one_dtype_and_end_where_they_are_full():
    sizes = [(torch.float32, 3), (torch.float64, 2), (torch.float32, 5), (torch.float32, 9), (torch.float32, 1)]
    tensors = [torch.randn(n, 2, dtype=dtype) for dtype, n in sizes]
    buckets = list(in_buckets(tensors, 64 / 2**20))
    assert [[len(tensor) for tensor in bucket] for bucket in buckets] == [[3, 5], [9], [1], [2]]
    for bucket in buckets:
        flat = flatten(bucket)
        assert flat.nbytes <= 64 or len(bucket) == 1
        assert all(torch.equal(part, tensor) for part, tensor in zip(unflatten(flat, bucket), bucket, strict=True))
    assert list(in_buckets([], 1)) == []
