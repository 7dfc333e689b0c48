"""A loss scale that several meshes of ranks share."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from polyphase.engine.precision.plugins import make_precision
from tests.distributed import run_ranks


def check_overflow(rank: int) -> None:
    """Ranks whose memory is laid out differently ask each other in one order whether a gradient overflowed."""
    littered = []
    for attempt in range(8):
        littered.append([object() for _ in range(1000 * rank + attempt)])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parameters = [nn.Parameter(torch.ones(2))]
        parameters += [
            nn.Parameter(distribute_tensor(torch.ones(4, 4), each, [Shard(0)] + [Replicate()] * (each.ndim - 1)))
            for each in (mesh["tp"], mesh["shard"], mesh)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if rank == 3:
            parameters[0].grad[0] = torch.inf
        scaler = make_precision("16-mixed", "cpu").scaler
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler.step(optimizer)
        assert torch.equal(parameters[0].detach(), torch.ones(2)), "the step was left out here"
        assert torch.equal(parameters[3].detach().full_tensor(), torch.ones(4, 4)), "and on all other ranks"


def test_an_overflow_is_asked_for_in_one_order_on_all_ranks():
    run_ranks(check_overflow, 4, timeout_s=90, start_method="fork")
