"""Gathers the state of a module from the stages of a pipeline."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from .plan import StagePlan

__all__ = ["buffer_stages", "gather_state"]


def buffer_stages(module: nn.Module, plan: StagePlan) -> dict[str, int]:
    """Maps the name of each buffer to the stage whose values are saved: all stages have the buffer."""
    stages = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        # Metrics are updated on the last stage.
        stage = plan.num_stages - 1 if isinstance(submodule, Metric) else plan.modules[submodule][0]
        for key, _ in submodule.named_buffers(recurse=False):
            stages[f"{name}.{key}" if name else key] = stage
    return stages


def gather_state(
    state: dict[str, Any], owners: dict[str, int], group: Any, *, sends: bool, device: torch.device
) -> dict[str, Any]:
    """Gathers the tensors of all stages, whole and in host memory, on the first rank of a pipeline; all ranks call it.

    Args:
        state: a state dict of the module, as this rank has it.
        owners: for each name the rank of the pipeline that has the values; missing names belong to the first rank.
        group: the ranks of this pipeline.
        sends: whether this pipeline gathers its tensors: one of several pipelines does.
        device: the device on which tensors are sent.
    """
    rank, whole = dist.get_rank(group), {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value  # a collective of all ranks
        owner = owners.get(name, 0)
        if sends and owner > 0 and rank == owner:
            dist.send(tensor.contiguous(), dist.get_global_rank(group, 0), group=group)
        if sends and owner > 0 and rank == 0:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(group, owner), group=group)
        if sends and rank == 0:
            whole[name] = tensor.cpu() if isinstance(tensor, Tensor) else tensor
    return whole
