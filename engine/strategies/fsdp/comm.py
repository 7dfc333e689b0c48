"""The collectives and hooks that replace FSDP2's own, unit by unit."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# The types that `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` take; torch does not export them.
from ..._compat.torch import AllGather, ReduceScatter
from ...attachments import attach_attributes, has_attributes
from ...compression import Bucket, CommHook, CountingGroup, ParamSlice

__all__ = [
    "CompressedReduceScatter",
    "CountedAllGather",
    "CountedReduceScatter",
    "ReplicaAverage",
    "attach_to_gathered",
    "fsdp_units",
    "reshard",
]


class ReplicaAverage:
    """Averages the shards of a unit over replicas by a comm hook.

    It is set as FSDP2's all-reduce hook, and FSDP2 itself knows only the mesh of shards.

    Args:
        hook: a comm hook whose group is the replicas.
        index: index of the unit.
        members: the unit's shards of parameters, in the order in which FSDP2 reduces them.
    """

    def __init__(self, hook: CommHook, index: int, members: tuple[ParamSlice, ...]) -> None:
        self.is_held = False
        """Whether gradients are kept and not sent: within an accumulation window."""
        self._hook = hook
        self._index = index
        self._members = members
        self._num_values = sum(member.numel for member in members)
        self._held: Tensor | None = None

    def __call__(self, shards: Tensor) -> None:
        """Replaces `shards` [n], the sum over this replica's ranks, by the average over replicas."""
        if shards.numel() != self._num_values:
            names = ", ".join(member.name for member in self._members)
            raise RuntimeError(
                f"compression {self._hook.flag!r} under hsdp needs a gradient for each parameter of a unit, but this"
                f" one has fewer: {names}. Set `requires_grad = False` before `fit` on those that are never trained, or"
                " compression='none'."
            )
        if shards.device.type != "cpu":
            # FSDP2 allocated `shards` on its reduce-scatter stream. It releases them while the all-reduce stream, on
            # which this code runs, may still use them: the next unit's reduce-scatter would get the same memory.
            shards.record_stream(torch.accelerator.current_stream(shards.device))
        with torch.no_grad():
            if self.is_held:
                self._held = shards.clone() if self._held is None else self._held.add_(shards)
                shards.zero_()  # FSDP2 adds the returned value to the gradient
                return
            if self._held is not None:
                shards.add_(self._held)
                self._held = None
            self._hook.run(Bucket(self._index, shards, self._members))


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Allocates, AllGather):
    """FSDP2's collective, through a group that counts its bytes."""

    def __init__(self, wire: CountingGroup, unit: int) -> None:
        self._wire, self._unit = wire, unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See `torch.distributed.fsdp._fully_shard._fsdp_api.AllGather`."""
        self._wire.bucket = self._unit
        return self._wire.all_gather_into(output_tensor, input_tensor, async_op)


class CountedReduceScatter(_Allocates, ReduceScatter):
    """FSDP2's collective, through a group that counts its bytes."""

    def __init__(self, wire: CountingGroup, unit: int) -> None:
        self._wire, self._unit = wire, unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """See `torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter`."""
        self._wire.bucket = self._unit
        return self._wire.reduce_scatter_into(output_tensor, input_tensor, op, async_op)


class CompressedReduceScatter(_Allocates, ReduceScatter):
    """The reduce-scatter of a unit's gradients by a comm hook."""

    def __init__(self, hook: CommHook, unit: int, members: tuple[ParamSlice, ...]) -> None:
        self._hook, self._unit, self._members = hook, unit, members

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See `torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter`."""
        with torch.no_grad():
            self._hook.run_reduce_scatter(output_tensor, input_tensor, self._unit, self._members)
            if op == dist.ReduceOp.SUM:
                output_tensor.mul_(group.size())


def fsdp_units(model: nn.Module, num_shards: int) -> Iterator[tuple[FSDPModule, tuple[ParamSlice, ...]]]:
    """Yields each unit with its trained shards, in FSDP2's order, padded to equal sizes as FSDP2 does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # A parameter that is no DTensor is whole on every rank: see `kept_whole.py`.
            trained = dict.fromkeys(p for p in _own_parameters(unit) if p.requires_grad and isinstance(p, DTensor))
            yield unit, tuple(ParamSlice(names[p], (-(-p.shape[0] // num_shards), *p.shape[1:])) for p in trained)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a unit, children's first, without those of other units."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
    yield from module.parameters(recurse=False)


def reshard(model: nn.Module) -> None:
    """Frees the parameters that units of a model have gathered."""
    for submodule in model.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def attach_to_gathered(model: nn.Module) -> None:
    """Makes the gathered copies of parameters, which a step uses, have the attributes and classes of the parameters."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # torch: FSDPState._fsdp_param_groups, FSDPParamGroup.fsdp_params, FSDPParam.sharded_param
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if has_attributes(parameter.sharded_param) and not isinstance(
                        parameter.init_unsharded_param, _Attaching
                    ):
                        parameter.init_unsharded_param = _Attaching(parameter, parameter.init_unsharded_param)  # type: ignore[method-assign]


class _Attaching:
    """Replaces the function that creates the gathered copy of a parameter when it is first gathered."""

    def __init__(self, parameter: Any, create: Callable[[], None]) -> None:
        self._parameter, self._create = parameter, create

    def __call__(self) -> None:
        self._create()
        gathered, parameter = self._parameter._unsharded_param, self._parameter.sharded_param
        if vars(gathered) is not vars(parameter):
            attach_attributes(parameter, gathered)
