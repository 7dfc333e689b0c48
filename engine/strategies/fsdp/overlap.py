"""`extra_overlap=true`: for networks on which a unit takes longer to send than to compute.

By default FSDP2 gathers the next unit early only if the host is ahead of the device, and its gathers and reductions
share one connection.
"""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["overlap_more"]

_NUM_BUFFERS = 2


def overlap_more(model: nn.Module, units: Sequence[nn.Module], timeout: timedelta) -> None:
    """Makes each unit gather the next one before it computes, and reductions use connections of their own.

    Args:
        model: sharded by `fully_shard`, as its units are; all ranks call it.
        units: in the order in which they run, without the rest of the model.
        timeout: timeout of collectives over these connections.
    """
    assert isinstance(model, FSDPModule)
    parts: list[Any] = [model, *units]
    for part, following in itertools.pairwise(parts):
        part.set_modules_to_forward_prefetch([following])
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(_NUM_BUFFERS)
    for part in parts:
        # torch: FSDPState._fsdp_param_groups, FSDPMeshInfo.reduce_scatter_process_group, which has a timeout of its own
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group.mesh_info.reduce_scatter_process_group.set_timeout(timeout)
