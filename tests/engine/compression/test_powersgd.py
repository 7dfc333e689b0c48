"""The rows that devices make orthonormal by themselves are as good as those of LAPACK's QR, whatever they come from."""

import pytest
import torch
from torch import Tensor

from polyphase.engine.compression.powersgd import _householder

SHAPES = [(8, 4, 256), (2, 32, 1024), (1, 4, 65536), (3, 5, 5), (2, 1, 100)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ill_conditioned(matrices: int, rank: int, columns: int) -> Tensor:
    """Of singular values from 1 to 1e-6."""
    mixed = torch.linalg.qr(random(matrices, rank, rank)).Q * torch.logspace(0, -6, rank)
    return mixed @ random(matrices, rank, columns)


INPUTS = {
    "random": random,
    "condition 1e6": ill_conditioned,
    "rank 1": lambda k, rank, n: random(k, rank, 1) @ random(k, 1, n),
    "equal rows": lambda k, rank, n: random(k, 1, n).expand(k, rank, n).contiguous(),
    "a row of zeros": lambda k, rank, n: random(k, rank, n) * (torch.arange(rank) != rank // 2)[:, None],
    "zeros": torch.zeros,
    "1e-30": lambda *shape: 1e-30 * random(*shape),
    "1e30": lambda *shape: 1e30 * random(*shape),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_rows_are_orthonormal_and_have_the_same_span(kind, shape):
    rows = INPUTS[kind](*shape)
    before = rows.clone()
    found = _householder(rows).double()
    assert torch.equal(rows, before)
    off = (found @ found.mT - torch.eye(shape[1])).abs().max()
    lost = (rows - rows.double() @ found.mT @ found).norm() / rows.double().norm().clamp_min(1e-300)
    # The sums of so many numbers in float32; LAPACK's are 3e-6 and 3e-6 off, and 1e-4 for equal rows.
    assert float(off) <= 3e-5
    assert float(lost) <= 3e-5


def test_rows_are_those_of_qr():
    rows = random(8, 4, 256)
    torch.testing.assert_close(_householder(rows), torch.linalg.qr(rows.mT).Q.mT, atol=1e-5, rtol=0)
