"""The collectives and hooks that replace FSDP2's own, unit by unit."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
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
from .unit_order import Call, UnitOrder

__all__ = [
    "CompressedReduceScatter",
    "CountedAllGather",
    "CountedReduceScatter",
    "KeptWhole",
    "ReplicaAverage",
    "attach_to_gathered",
    "fsdp_units",
    "kept_whole",
    "refuse_fused",
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
            # A parameter that is no DTensor is whole on every rank: see below.
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


# Parameters that FSDP2 can't cut into shards: every rank keeps them whole, and their gradients are averaged here.
#
# A parameter without a dim has nothing to cut. A parameter of another dtype can't be gathered in one tensor with the
# rest of its unit. A complex parameter, if it were cut, would get other updates than in one process. All of these are
# FSDP2's `ignored_params`.
#
# Communication: per backward that averages, one all-reduce of each gradient when it is complete; backward waits for it.


def kept_whole(model: nn.Module, units: Collection[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters that can't be sharded, by name: 0-d, empty, complex, or of a rarer dtype in a unit.

    Warns of the last two kinds, since every rank needs memory for them and their optimizer state.

    Args:
        model: with all its parameters, on any device.
        units: its modules that will be units; everything outside of them is one more unit.
    """
    unshardable: dict[str, nn.Parameter] = {}
    rare: dict[str, nn.Parameter] = {}
    by_unit: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for unit, name, part in _members_by_unit(model, model, units, ""):
        for key, parameter in part.named_parameters(recurse=False):
            path = f"{name}.{key}".lstrip(".")
            if parameter.dim() == 0 or parameter.numel() == 0:  # torch reduces no empty shards
                unshardable[path] = parameter
            elif parameter.is_complex():
                rare[path] = parameter
            elif parameter.requires_grad:  # torch: the dtypes of the others may differ
                by_unit.setdefault(unit, {})[path] = parameter
    for of_unit in by_unit.values():
        sizes: Counter[torch.dtype] = Counter()
        for parameter in of_unit.values():
            sizes[parameter.dtype] += parameter.numel()
        rare |= {path: p for path, p in of_unit.items() if p.dtype != max(sizes, key=lambda dtype: sizes[dtype])}
    if rare:
        num_bytes = sum(p.numel() * p.element_size() for p in rare.values())
        names = ", ".join(f"{path} ({parameter.dtype})" for path, parameter in rare.items())
        warnings.warn(
            f"every rank keeps the whole of {names} ({num_bytes:,} bytes): parameters that are sharded together must"
            " have one real dtype, that of most of the unit. To shard real ones too, return their module as a unit from"
            " `shard_units()`.",
            stacklevel=2,
        )
    return unshardable | rare


def _members_by_unit(
    submodule: nn.Module, unit: nn.Module, units: Collection[nn.Module], name: str
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """`submodule` and all modules below it, each with its unit and name."""
    unit = submodule if submodule in units else unit
    yield unit, name, submodule
    for key, child in submodule.named_children():
        yield from _members_by_unit(child, unit, units, f"{name}.{key}".lstrip("."))


def refuse_fused(optimizers: Iterable[torch.optim.Optimizer], whole: dict[str, nn.Parameter], flag: str) -> None:
    """Checks that no optimizer handles whole parameters and shards in one operation, which torch can't do.

    Raises:
        ValueError: an optimizer does.
    """
    names = {id(parameter): name for name, parameter in whole.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            asked = next((key for key in ("foreach", "fused") if group.get(key)), None)
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            if asked and own and len(own) < len(group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} was given {asked}=True, but under {flag} every rank keeps"
                    f" {', '.join(own)} whole beside shards of the others, and one operation can't take both: leave"
                    f" {asked} out, or put these parameters into a group of their own with {asked}=False."
                )


class KeptWhole:
    """Averages the gradients of whole parameters over the ranks, each when a backward has completed it.

    Within an accumulation window the gradients add up on each rank; the last micro-batch averages the sum.

    Args:
        parameters: by name; the same on all ranks.
        wire: group of the ranks with different samples.
        order: checks that all ranks average the same gradients in the same order; None with one rank.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], wire: CountingGroup, order: UnitOrder | None) -> None:
        self.is_held = False
        """Whether gradients are kept and not sent: within an accumulation window."""
        self.wire = wire
        self._order = order
        self._handles: list[Any] = []
        for name, parameter in parameters.items():
            unit = -1 if order is None else order.add(name)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch accepts a hook only then; the parameter may be unfrozen later

            def average(parameter: Tensor, unit: int = unit) -> None:
                self._average(parameter, unit)

            self._handles.append(parameter.register_post_accumulate_grad_hook(average))
            parameter.requires_grad_(trained)

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _average(self, parameter: Tensor, unit: int) -> None:
        if self.is_held or parameter.grad is None:
            return
        if self._order is not None:
            self._order.check(Call("reduce", unit, 1))
        self.wire.bucket = unit
        with torch.no_grad():
            self.wire.all_reduce(parameter.grad).div_(self.wire.size)
