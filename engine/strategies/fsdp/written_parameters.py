"""Writes of a hook to sharded parameters and gradients have the effect that they have in one process.

`p.data = values` does not change the rank's part of a DTensor `p` in torch, `p[index] = values` raises an error, and
`p[0].zero_()` changes a gathered copy of the row; here they write. `p.numpy()` is refused: this rank has a shard.

Communication: `p[index] = values` and `p[0].zero_()` gather `p`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.grads import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..._compat.torch import DTensorSpec, tree_leaves, tree_map_only
from ...distributed.buckets import local_part
from ..contents import begin_count, end_count, num_writes
from ..operator_rules import install_reductions, restore_operator_rules
from ..whole_steps import GATHERED, check_assignment
from .unit_order import READ, WRITE, UnitOrder

__all__ = ["forget_data", "give_back_numbers", "keep_data", "keep_writes", "read_whole_numbers"]

_data: Any = Tensor.data


class _Part(DTensor):
    """A copy of a part of a sharded tensor, gathered by its index; a write into it in place is written back."""

    # Names that are not attributes of torch's tensors.
    whole_tensor: DTensor
    index_in_whole: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions and methods."""
        with torch._C.DisableTorchFunctionSubclass():  # torch: for implementations of this method
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
            if is_in_place and args and isinstance(args[0], _Part):
                args[0].write_back()
        return result

    def write_back(self) -> None:
        """Writes the present values into the whole tensor."""
        with torch.no_grad():
            self.whole_tensor[self.index_in_whole] = self.full_tensor()


def _get_item(tensor: Any, index: Any) -> Any:
    part: Any = Tensor.__getitem__(tensor, index)
    if torch.compiler.is_compiling():  # its tensors have no memory
        return part
    indices = index if isinstance(index, tuple) else (index,)
    is_view = all(entry is None or entry is ... or isinstance(entry, (int, slice)) for entry in indices)
    # Activations are no leaves; parameters and gradients are.
    if is_view and tensor.is_leaf and type(part) is DTensor and not _share_memory(tensor, part):
        written_back: Any = part
        written_back.__class__ = _Part
        written_back.whole_tensor, written_back.index_in_whole = tensor, index
        vars(written_back).pop(GATHERED, None)
    return part


def _share_memory(one: DTensor, other: DTensor) -> bool:
    storages = [tensor._local_tensor.untyped_storage() for tensor in (one, other)]  # torch: DTensor._local_tensor
    return storages[0].data_ptr() == storages[1].data_ptr()


def keep_data(order: UnitOrder | None, flag: str) -> None:
    """Makes these writes take effect, and refuses arrays, until `forget_data`.

    Args:
        order: checks that all ranks write parts in the same order; None: no check.
        flag: the strategy's, for messages.
    """

    def set_item(tensor: Any, index: Any, values: Any) -> None:
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise RuntimeError(f"under {flag} a part of a tensor that is a sum over ranks can't be written: reduce it.")
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # as torch
        if order is not None:
            order.check(WRITE)
        # An activation is no leaf: its gradient, and that of the values, goes through the write.
        is_activation = not tensor.is_leaf or any(isinstance(t, Tensor) and t.grad_fn for t in tree_leaves(values))
        with torch.set_grad_enabled(is_activation and torch.is_grad_enabled()):
            whole = tensor.full_tensor().clone()
            index, values = tree_map_only(DTensor, lambda other: other.full_tensor(), (index, values))
            whole[index] = values
            replica = DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
            tensor.copy_(replica.redistribute(placements=tensor.placements))
            if isinstance(tensor, _Part):
                tensor.write_back()

    def numpy(tensor: Any, **unused: Any) -> Any:
        raise RuntimeError(
            f"under {flag} a NumPy array of a parameter or gradient of shape {tuple(tensor.shape)} is refused: this"
            " rank has a shard of it. Call `full_tensor()` on all ranks, and `numpy()` of that copy; write with torch's"
            " own operations, such as `clamp_`; or choose strategy 'ddp'."
        )

    def array(tensor: Any, *unused: Any, **also_unused: Any) -> Any:
        return numpy(tensor)

    def deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
        # torch: Tensor.__deepcopy__ takes a gradient's offset in its bucket for an address, and copies no memory.
        if isinstance(tensor, nn.Parameter) or not tensor.is_leaf:
            return Tensor.__deepcopy__(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.clone()
        return memo[id(tensor)]

    replaced: dict[str, Any] = {
        "__deepcopy__": deep_copy,
        "data": property(_data.__get__, _set),
        "__getitem__": _get_item,
        "__setitem__": set_item,
        "numpy": numpy,
        "__array__": array,
    }
    for name, attribute in replaced.items():
        setattr(DTensor, name, attribute)


def forget_data() -> None:
    """Restores torch's attributes."""
    for name in ("data", "__deepcopy__", "__getitem__", "__setitem__", "numpy", "__array__"):
        if name in vars(DTensor):
            delattr(DTensor, name)


def _set(tensor: Any, value: Any) -> None:
    if isinstance(value, DTensor) and (value.shape, value.dtype, value.device) == (
        tensor.shape, tensor.dtype, tensor.device,
    ):  # fmt: skip
        check_assignment()
        with torch.no_grad():
            tensor.detach().copy_(value)
    else:
        _data.__set__(tensor, value)


# Writes of a forward into the parameters of its unit: each rank keeps its shard of them.
#
# While a unit's forward runs, its parameters are whole copies, which are dropped after it. A block that bounds the norm
# of its weight, clamps it, or initialises it from the first batch writes into these copies.
#
# Communication: nothing, unless a forward has written. Then one all-reduce of 32 bytes for each written parameter,
# which blocks, since all ranks must have written the same. What a rank has made of its own samples is refused.


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
        wholes = [local_part(p._unsharded_param).detach() for p in written]
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
                local_part(parameter.sharded_param).copy_(shards[mesh.shard_mesh_rank])


# `float(p.norm())` and `p.sum().item()` of a sharded parameter give the number of the whole, not of this rank's shard.
#
# DTensor's `item` returns the local value: of a norm or sum that is not reduced yet, the value of the rank's own shard.
# So an optimizer that reads it (LARS, LAMB) would scale each shard of a parameter differently. Here each such number is
# one all-reduce of 4 bytes on all ranks. `p.norm(dim=0).sum()` and `(p > 1).any(0).sum()` are those of the whole, too.
#
# Each number that Lightning's `grad_norm` returns is such a number, too. The function stacks DTensors, which torch
# can't do. Users import it before a run, so its code object is replaced during a run.

_ITEM = torch.ops.aten._local_scalar_dense.default
_dispatcher: Any = DTensor._op_dispatcher  # torch: DTensor._op_dispatcher


def read_whole_numbers(order: UnitOrder | None) -> None:
    """Makes reductions and `item` of a DTensor those of the whole, and checks torch's own, until `give_back_numbers`.

    Args:
        order: checks that all ranks make these reductions in the same order; None: no check.
    """

    def item(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
        (tensor,) = args
        if all(placement.is_replicate() for placement in tensor.placements):
            return tensor.to_local().item()
        if order is not None:
            order.check(READ)
        with torch.no_grad():
            return tensor.full_tensor().item()

    def redistribute(operation: Any, arguments: Any, *args: Any) -> None:
        if order is not None and _communicates(operation, arguments):
            order.check(READ)
        type(_dispatcher).redistribute_local_args(operation, arguments, *args)

    install_reductions()
    _dispatcher._custom_op_handlers[_ITEM] = item  # torch: OpDispatcher._custom_op_handlers
    vars(_dispatcher)["redistribute_local_args"] = redistribute  # torch: OpDispatcher.redistribute_local_args
    grad_norm.__code__ = _grad_norm.__code__
    DTensor.__format__ = _formatted  # type: ignore[method-assign, assignment]


def _communicates(operation: Any, arguments: Any) -> bool:
    """Whether an argument gets another placement; False if torch only asks for another size (`new_empty`)."""
    is_flat = operation.args_tree_spec is None  # torch: OpInfo.args_tree_spec, OpSchema.args_schema
    placed = arguments.args_schema if is_flat else tree_leaves(arguments.args_schema)
    return any(
        isinstance(spec, DTensorSpec) and spec.placements != placed[index].placements
        for index, spec in enumerate(operation.flat_args_schema)  # torch: OpInfo.flat_args_schema
    )


def give_back_numbers() -> None:
    """Restores torch's functions."""
    restore_operator_rules()
    _dispatcher._custom_op_handlers.pop(_ITEM, None)
    vars(_dispatcher).pop("redistribute_local_args", None)
    grad_norm.__code__ = _LIGHTNINGS
    DTensor.__format__ = Tensor.__format__  # type: ignore[method-assign]


def _formatted(tensor: DTensor, spec: str) -> str:
    """torch's `Tensor.__format__`, which knows plain tensors only: for `f"{p.norm():.3f}"`."""
    return format(tensor.item(), spec) if tensor.ndim == 0 else object.__format__(tensor, spec)


_LIGHTNINGS = grad_norm.__code__


def _grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    import sys  # this code runs with the globals of Lightning's module

    this_module = sys.modules["polyphase.engine.strategies.fsdp.written_parameters"]
    return this_module._gradient_norms(module, float(norm_type), group_separator)


def _gradient_norms(module: nn.Module, norm_type: float, separator: str) -> dict[str, Tensor]:
    """Returns the result of Lightning's `grad_norm`: the norm of each gradient, and of all together."""
    if norm_type <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = parameter.grad.detach().norm(norm_type)
            norms[f"grad_{norm_type}_norm{separator}{name}"] = torch.tensor(float(norm), device=norm.device)
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.tensor(list(norms.values())).norm(norm_type)
    return norms
