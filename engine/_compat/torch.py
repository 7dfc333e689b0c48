"""Private classes and functions of torch, imported when they are first used: some modules take a second."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C import _distributed_c10d
    from torch._dynamo import OptimizedModule
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch._utils import ExceptionWrapper
    from torch.autograd.graph import _engine_run_backward
    from torch.distributed import _composable_state, _functional_collectives
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.flight_recorder.components.utils import match_one_event
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
    from torch.distributed.tensor._random import manual_seed
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.utils.stateless import _reparametrize_module
    from torch.optim import _muon
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.data import _utils
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
    from torch.utils.data._utils.worker import WorkerInfo, _generate_state
    from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

__all__ = [
    "AllGather",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "ExceptionWrapper",
    "FakeTensor",
    "FakeTensorMode",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OptimizedModule",
    "ReduceScatter",
    "TorchDispatchMode",
    "TupleStrategy",
    "WorkerInfo",
    "_BatchNorm",
    "_ConvNd",
    "_DatasetKind",
    "_IterableDatasetFetcher",
    "_MapDatasetFetcher",
    "_MultiProcessingDataLoaderIter",
    "_NormBase",
    "_SingleProcessDataLoaderIter",
    "_StridedShard",
    "_attention",
    "_composable_state",
    "_distributed_c10d",
    "_engine_run_backward",
    "_functional_collectives",
    "_generate_state",
    "_muon",
    "_reparametrize_module",
    "_utils",
    "manual_seed",
    "match_one_event",
    "tree_leaves",
    "tree_map_only",
]

HOMES = {
    "_functional_collectives": "torch.distributed",
    "AllGather": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives",
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec",
    "ExceptionWrapper": "torch._utils",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "OpSchema": "torch.distributed.tensor._op_schema",
    "OpSpec": "torch.distributed.tensor._op_schema",
    "OpStrategy": "torch.distributed.tensor._op_schema",
    "OptimizedModule": "torch._dynamo",
    "ReduceScatter": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "TupleStrategy": "torch.distributed.tensor._op_schema",
    "WorkerInfo": "torch.utils.data._utils.worker",
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_ConvNd": "torch.nn.modules.conv",
    "_DatasetKind": "torch.utils.data.dataloader",
    "_IterableDatasetFetcher": "torch.utils.data._utils.fetch",
    "_MapDatasetFetcher": "torch.utils.data._utils.fetch",
    "_MultiProcessingDataLoaderIter": "torch.utils.data.dataloader",
    "_NormBase": "torch.nn.modules.batchnorm",
    "_SingleProcessDataLoaderIter": "torch.utils.data.dataloader",
    "_StridedShard": "torch.distributed.tensor.placement_types",
    "_attention": "torch.distributed.tensor.experimental._context_parallel",
    "_composable_state": "torch.distributed",
    "_distributed_c10d": "torch._C",
    "_engine_run_backward": "torch.autograd.graph",
    "_generate_state": "torch.utils.data._utils.worker",
    "_muon": "torch.optim",
    "_reparametrize_module": "torch.nn.utils.stateless",
    "_utils": "torch.utils.data",
    "manual_seed": "torch.distributed.tensor._random",
    "match_one_event": "torch.distributed.flight_recorder.components.utils",
    "tree_leaves": "torch.utils._pytree",
    "tree_map_only": "torch.utils._pytree",
}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(HOMES[name])
    value = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{HOMES[name]}.{name}")
    globals()[name] = value
    return value
