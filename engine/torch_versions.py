"""What differs between the versions of torch that the engine runs on, 2.11 to 2.15: asked and answered here alone.

What is there is looked for by its name, not by a number: nightlies and builds of vendors count in their own way.
"""

import inspect

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["CAN_REPEAT_SHARDED", "SYNC_BUFFERS", "VIEWS", "all_gather", "reduce_scatter"]

# Torch 2.13 renamed the three below and warns about the old names, of an argument even where it has its default value.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
"""By which name `DistributedDataParallel` is told whether rank 0's buffers go to all ranks before each forward."""

CAN_REPEAT_SHARDED = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 can be brought back from a step that failed half-way: since torch 2.13."""

# torch: _op_dispatcher, which knows how each operator treats DTensors; in 2.11 it refuses `view_copy`.
_rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
_aten = torch.ops.aten
VIEWS = tuple(
    operator
    for operator in (_aten.view.default, _aten._unsafe_view.default, _aten.view_copy.default, _aten.reshape.default)
    if operator in _rules
)
"""The operators that give a DTensor another shape."""
