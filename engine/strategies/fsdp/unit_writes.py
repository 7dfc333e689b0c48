"""Writes of a forward into the parameters of its unit: each rank keeps its shard of them.

While a unit's forward runs, its parameters are whole copies, which are dropped after it. A block that bounds the norm
of its weight, clamps it, or initialises it from the first batch writes into these copies.

Communication: nothing, unless a forward has written. Then one all-reduce of 32 bytes for each written parameter, which
blocks, since all ranks must have written the same. What a rank has made of its own samples is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..counted_writes import begin_count, end_count, num_writes
from .unit_order import WRITE, UnitOrder

__all__ = ["keep_writes"]


def keep_writes(
    model: nn.Module,
    flag: str,
    order: UnitOrder | None,
    group: Any,
    *,
    watches_data: bool,
    name_of: Callable[[Tensor], str] | None = None,
) -> None:
    """Makes all units of `model`, and the rest of it, keep what their forward writes into their parameters.

    Args:
        model: sharded by `fully_shard`.
        flag: the strategy's, for messages.
        order: checks that all ranks have written; None: there is one rank.
        group: all ranks with other samples.
        watches_data: whether writes through `parameter.data` count; compiled units take no parameters of another class.
        name_of: returns the name of a whole copy; refuses all writes, by this name.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # torch: FSDPState._fsdp_param_groups, FSDPParamGroup.pre_forward and post_forward
            for parameters in unit._get_fsdp_state()._fsdp_param_groups:
                _Writes(parameters, flag, order, group, watches_data, name_of)


class _Writes:
    def __init__(
        self,
        parameters: Any,
        flag: str,
        order: UnitOrder | None,
        group: Any,
        watches_data: bool,
        name_of: Callable[[Tensor], str] | None,
    ) -> None:
        self._members, self._flag, self._order, self._group = parameters, flag, order, group
        self._watches_data, self._name_of = watches_data, name_of
        self._versions: list[int] = []
        earlier: Any = getattr(parameters.post_forward, "__self__", None)  # of an earlier run
        is_wrapped = isinstance(earlier, _Writes)
        self.pre_forward: Callable[..., Any] = earlier.pre_forward if is_wrapped else parameters.pre_forward
        self.post_forward: Callable[..., Any] = earlier.post_forward if is_wrapped else parameters.post_forward
        parameters.pre_forward, parameters.post_forward = self.begin, self.end

    def _copies(self) -> list[Tensor]:
        return [p._unsharded_param for p in self._members.fsdp_params]  # torch: FSDPParam._unsharded_param

    def begin(self, *args: Any) -> Any:
        """Called before a forward, when the parameters are whole."""
        result = self.pre_forward(*args)
        self._versions = [begin_count(p) if self._watches_data else num_writes(p) for p in self._copies()]
        return result

    def end(self, *args: Any) -> Any:
        """Called after a forward, before the copies are dropped."""
        versions, self._versions = self._versions, []
        count = end_count if self._watches_data else num_writes
        now = [count(whole) for whole in self._copies()] if versions else []
        if versions != now:
            changed = [before != after for before, after in zip(versions, now, strict=True)]
            self._keep([p for p, is_written in zip(self._members.fsdp_params, changed, strict=True) if is_written])
        return self.post_forward(*args)

    @torch.no_grad()
    def _keep(self, written: list[Any]) -> None:
        if self._name_of is not None:
            raise RuntimeError(
                f"under {self._flag} a forward writes into {self._name_of(written[0]._unsharded_param)!r}, and this"
                " rank has a shard of it: write in a hook, such as on_train_batch_end, or choose 'pp', 'pp+ddp' or"
                " 'fsdp'."
            )
        wholes = [_local(p._unsharded_param).detach() for p in written]
        names = [p._param_fqn or "?" for p in written]
        if self._order is not None:
            self._order.check(WRITE)
            sums = [torch.stack([w.double().sum(), w.double().square().sum()]) for w in wholes]
            own = torch.stack(sums).nan_to_num()
            both = torch.cat([own, -own])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            most, least = both.chunk(2)
            differ = (most != -least).any(1).tolist()
            if any(differ):
                different = [name for name, differs in zip(names, differ, strict=True) if differs]
                raise RuntimeError(
                    f"under {self._flag} a forward writes into {', '.join(different)}, and each rank writes other"
                    " values, made of its own samples; one process would have written those of all samples. This is"
                    " refused. Initialise parameters before `fit`, or write them in a hook, such as on_train_batch_end,"
                    " from what all ranks have in common. This step has changed no other weights."
                )
        for parameter, whole in zip(written, wholes, strict=True):
            # torch: FSDPParam.fsdp_placement and mesh_info; it cuts as Tensor.chunk does.
            mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
            shards = whole.chunk(mesh.shard_mesh_size, dim)
            if mesh.shard_mesh_rank < len(shards):
                _local(parameter.sharded_param).copy_(shards[mesh.shard_mesh_rank])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
