"""The state of a module whose parts are on the stages of a pipeline."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from .plan import Plan

__all__ = ["buffer_stages", "on_first_stage"]


def buffer_stages(module: nn.Module, plan: Plan) -> dict[str, int]:
    """Maps each name of a buffer to the stage whose values of it count: all stages have one."""
    stages = {}
    for name, part in module.named_modules(remove_duplicate=False):
        # Metrics are updated on the last stage.
        stage = plan.num_stages - 1 if isinstance(part, Metric) else plan.modules[part][0]
        for key, _ in part.named_buffers(recurse=False):
            stages[f"{name}.{key}" if name else key] = stage
    return stages


def on_first_stage(
    state: dict[str, Any], owners: dict[str, int], group: Any, *, speaks: bool, device: torch.device
) -> dict[str, Any]:
    """Whole tensors of all stages, in host memory, on the first rank of a pipeline; all ranks call it.

    Args:
        state: a state dict of the module, as this rank has it.
        owners: by name, the rank of the pipeline that has a tensor's values; the first has all others.
        group: the ranks of this pipeline.
        speaks: whether this pipeline brings its tensors together: one of several does.
        device: on which tensors are sent.
    """
    rank, whole = dist.get_rank(group), {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value  # by all ranks
        owner = owners.get(name, 0)
        if speaks and owner > 0 and rank == owner:
            dist.send(tensor.contiguous(), dist.get_global_rank(group, 0), group=group)
        if speaks and owner > 0 and rank == 0:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(group, owner), group=group)
        if speaks and rank == 0:
            whole[name] = tensor.cpu() if isinstance(tensor, Tensor) else tensor
    return whole
