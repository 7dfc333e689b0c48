"""The norm of gradients that are cut over ranks, in dtypes that can't hold its square."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyphase.engine.precision.clipping import clip_by_norm
from tests.distributed import run_ranks


def check_a_large_norm(rank: int, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2,))
    cut = nn.Parameter(DTensor.from_local(torch.zeros(4, dtype=dtype), mesh, [Shard(0)]))
    cut.grad = DTensor.from_local(torch.full((4,), 150.0, dtype=dtype), mesh, [Shard(0)])  # of norm 300 on each rank
    whole = nn.Parameter(torch.zeros((), dtype=dtype))
    whole.grad = torch.tensor(400.0, dtype=dtype)
    norm = (300**2 + 300**2 + 400**2) ** 0.5
    assert float(clip_by_norm([cut, whole], 1.0)) == pytest.approx(norm, rel=5e-3)
    assert cut.grad.to_local().tolist() == pytest.approx([150 / norm] * 4, rel=1e-2)
    assert float(whole.grad) == pytest.approx(400 / norm, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_whose_square_overflows(dtype):
    run_ranks(check_a_large_norm, 2, dtype, start_method="fork")
