"""Gathers weights in 16 bits if autocast would round them to 16 bits: half the bytes, and the same numbers.

Under `bf16-mixed` and `16-mixed` autocast casts the weights of a linear layer or a convolution before it uses them.
Here each rank casts its shards before they are gathered, and the layer gets a `Rounded`: a tensor of dtype float32 that
has only the 16-bit values. A cast of the `Rounded` by autocast returns these values. Backward needs them, too: they are
in FSDP2's memory, which is freed and gathered again with the unit. Autograd records a cast in either case, so gradients
are float32 and have the same values.

Any other operation on a `Rounded` (its norm, a layer that is called outside of autocast) computes with the float32
values. They are gathered for that operation only: one more all-gather of 4 P (S-1)/S bytes for P values and S shards,
which blocks. It is checked and counted like the unit's own all-gather.

A compiled block gets plain 16-bit tensors, as with FSDP2's `MixedPrecisionPolicy`, whose gradients are float32. Its
graph can't gather float32 values, so a weight that some code of the module may use in another way is gathered in
float32, and a graph that nevertheless uses one so is refused.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.fx import GraphModule, Node
from torch.nn import functional

# torch: its own tensor subclasses map their arguments with it; torch.utils.pytree has no map by type.
from ..._compat.torch import tree_map_only
from ..block_precision import cast_weight
from ..float8 import float8_linear
from ..units import CompiledBlock
from .unit_plan import ANY, weights_used_in

__all__ = ["Rounded", "check_uses", "gather_rounded"]

_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_IN_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
_CAST: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((*_LINEAR, *_CONVOLUTIONS), ("weight", "bias")),
    nn.MultiheadAttention: _IN_ATTENTION,
}
"""The layers, and their parameters, that autocast casts. Subclasses may use them in another way."""

# torch: the functions that call an autocast operation and cast nothing themselves; also the private ones
# _ConvNd._conv_forward, functional._in_projection_packed and _in_projection.
_FORWARDS = {
    function.__code__
    for function in (
        nn.Linear.forward,
        nn.Conv1d._conv_forward,
        nn.Conv2d._conv_forward,
        nn.Conv3d._conv_forward,
        nn.ConvTranspose1d.forward,
        nn.ConvTranspose2d.forward,
        nn.ConvTranspose3d.forward,
        functional.multi_head_attention_forward,
        functional._in_projection_packed,  # type: ignore[attr-defined]
        functional._in_projection,  # type: ignore[attr-defined]
        float8_linear,
        cast_weight,
    )
}


class Rounded(Tensor):
    """A float32 tensor that has its 16-bit values, and gathers its float32 values when an operation needs them.

    Args:
        values: the 16-bit values; their memory is freed and filled again.
        gather: returns the float32 values.
        name: name of the parameter, for messages.
    """

    # Names that are not attributes of torch's tensors.
    rounded_values: Tensor
    gather_values: Callable[[], Tensor]
    parameter_name: str
    # Functions of torch treat it as any float32 tensor; the operations that they call are handled here.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, gather: Callable[[], Tensor], name: str) -> "Rounded":  # noqa: D102
        # torch: Tensor._make_wrapper_subclass, which creates tensors without their own memory
        return Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=torch.float32, device=values.device
        )

    def __init__(self, values: Tensor, gather: Callable[[], Tensor], name: str) -> None:
        self.rounded_values, self.gather_values, self.parameter_name = values, gather, name

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rounded({tuple(self.shape)}, {self.rounded_values.dtype})"

    def data_ptr(self) -> int:
        """Raises, since torch would return 0, and a kernel would read from that address."""
        raise RuntimeError(
            f"the address of {self.parameter_name!r} was requested, but under fsdp and mixed precision a block has"
            " gathered it in 16 bits: pass `weight.clone()` to your own kernel, or use strategy='ddp'."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Rounded):
            if func is torch.ops.aten._to_copy.default and _is_cast(kwargs, first.rounded_values.dtype):
                # A layer's forward neither writes to the cast tensor nor returns it, so it needs no copy.
                is_layers = sys._getframe(1).f_code in _FORWARDS
                return first.rounded_values.detach() if is_layers else first.rounded_values.clone()
            if func.is_view:
                return _views(first, func, args[1:], kwargs)
        _refuse_writes(func, args, kwargs)
        return func(*tree_map_only(Rounded, _gathered, args), **tree_map_only(Rounded, _gathered, kwargs))


def _is_cast(kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    return kwargs.get("dtype") == dtype and not any(value for key, value in kwargs.items() if key != "dtype")


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    for index, argument in enumerate(func._schema.arguments):  # torch: OpOverload._schema
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Rounded):
                raise RuntimeError(
                    f"{func} writes into {tensor.parameter_name!r} while its block runs. Under fsdp and mixed precision"
                    " that is a copy in 16 bits, of which each rank keeps a shard, and the change would be lost. Write"
                    " it in a hook, such as on_train_batch_end, or use strategy='ddp'."
                )


def _gathered(tensor: Rounded) -> Tensor:
    return tensor.gather_values()


def _views(base: Rounded, func: Any, args: Any, kwargs: Any) -> Any:
    """Views of the 16-bit values, and of the float32 values when they are used."""

    def view(index: int | None) -> Tensor:
        views = func(base.gather_values(), *args, **kwargs)
        return views if index is None else views[index]

    values = func(base.rounded_values, *args, **kwargs)
    if isinstance(values, Tensor):
        return Rounded(values, functools.partial(view, None), base.parameter_name)
    return [Rounded(part, functools.partial(view, index), base.parameter_name) for index, part in enumerate(values)]


def gather_rounded(
    model: nn.Module, dtype: torch.dtype | None, compiled: Mapping[nn.Module, CompiledBlock] | None = None
) -> None:
    """Makes all blocks of `model` gather in `dtype` the weights that autocast would cast to it; None: gather in
    float32.

    Weights outside of blocks are gathered in their own dtype, since a step may use them in any way.

    Args:
        model: sharded by `fully_shard`; no block is running.
        dtype: dtype of autocast.
        compiled: the blocks that are compiled.
    """
    compiled = compiled or {}
    used = weights_used_in(model, strictly=True) if compiled and dtype is not None else set()
    if ANY in used:
        rank_zero_info(
            "compile: the weights of compiled blocks are gathered in float32, since code of"
            f" {_class_of(model).__name__} may use them without calling their layers."
        )
    named = model.named_modules(remove_duplicate=False)
    uses = {layer for name, layer in named if not used.isdisjoint({ANY, name.rpartition(".")[2]})}
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and unit is not model:
            unit.reshard()
            block = compiled.get(unit)
            rounded: list[tuple[Any, Any]] = []
            # torch: FSDPState._fsdp_param_groups, FSDPParamGroup.fsdp_params
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    is_used = block is not None and (block.is_hooked or any(m in uses for m, _ in _holders(parameter)))
                    is_cast = dtype is not None and _is_cast_everywhere(parameter) and not is_used
                    _gather_as(dtype if is_cast else None, parameter, group, is_plain=block is not None)
                    rounded += [(parameter, group)] if is_cast else []
            if block is not None:
                block.as_written = (
                    functools.partial(_outside_of_autocast, dtype, rounded) if dtype and rounded else None
                )


def _holders(parameter: Any) -> list[tuple[nn.Module, str]]:
    # torch: FSDPParam._module_info, the holders of a parameter and its name in each
    info = parameter._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _is_cast_everywhere(parameter: Any) -> bool:
    # torch: FSDPParam.is_dtensor, of tensor parallelism
    is_float32 = parameter.sharded_param.dtype == torch.float32 and not parameter.is_dtensor
    return is_float32 and all(name in _CAST.get(_class_of(module), ()) for module, name in _holders(parameter))


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class before `fully_shard`, which creates a subclass for each unit."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


def _gather_as(dtype: torch.dtype | None, parameter: Any, group: Any, *, is_plain: bool) -> None:
    # torch: FSDPParam.param_dtype, init_dtype_attrs, init_unsharded_param, _unsharded_param, all_gather_outputs,
    # _param_fqn, mp_policy
    if (getattr(parameter, "param_dtype", None), vars(parameter).get("is_plain", False)) == (dtype, is_plain):
        return
    parameter.is_plain = is_plain
    kind = type(parameter)
    policy = parameter.mp_policy if dtype is None else MixedPrecisionPolicy(param_dtype=dtype)
    # Memory into which an earlier run has gathered.
    parameter.all_gather_outputs = []
    vars(parameter).pop("_unsharded_param", None)

    def init_dtype_attrs(_: Any = None) -> None:
        # FSDP2 calls it before the first forward with the policy of the unit, the same for all its parameters.
        kind.init_dtype_attrs(parameter, policy)

    def init_unsharded_param() -> None:
        is_new = not hasattr(parameter, "_unsharded_param")
        kind.init_unsharded_param(parameter)
        if is_new and dtype is not None and is_plain:
            parameter._unsharded_param.grad_dtype = (
                torch.float32
            )  # in which autograd adds them up, and FSDP2 sends them
        elif is_new and dtype is not None:
            whole = functools.partial(_gather_whole, parameter, group)
            rounded = Rounded(parameter._unsharded_param.detach(), whole, parameter._param_fqn)
            parameter._unsharded_param = nn.Parameter(rounded, parameter.sharded_param.requires_grad)

    parameter.init_dtype_attrs, parameter.init_unsharded_param = init_dtype_attrs, init_unsharded_param
    init_dtype_attrs()


@torch.no_grad()
def _gather_whole(parameter: Any, group: Any) -> Tensor:
    """Returns the float32 values of a parameter, from all ranks' shards."""
    # torch: FSDPParam._sharded_param_data, _orig_size, _contiguous_orig_stride; FSDPParamGroup._all_gather_comm,
    # _all_gather_process_group
    shard = parameter._sharded_param_data.to(parameter.device)
    ranks = group._all_gather_process_group
    if ranks.size() > 1:
        gather = group._all_gather_comm
        all_shards = gather.allocate((shard.numel() * ranks.size(),), dtype=shard.dtype, device=shard.device)
        gather(output_tensor=all_shards, input_tensor=shard, group=ranks)
        shard = all_shards
    return shard.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)


# --- compiled blocks


def _outside_of_autocast(dtype: torch.dtype, rounded: list[tuple[Any, Any]]) -> AbstractContextManager[None] | None:
    """The context of a compiled block's own code if it is called outside of autocast, which its graph relies on."""
    kind = rounded[0][0].device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype:
        return None
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{_class_of(rounded[0][1].modules[0]).__name__} is called outside of autocast and with gradients, but"
            f" under fsdp, mixed precision and compile its weights are gathered in {dtype}: call it in"
            " `training_step`, in `with torch.autocast(...)`, in `with torch.no_grad()`, or leave out compile."
        )
    return _in_float32(rounded)


@contextmanager
def _in_float32(rounded: list[tuple[Any, Any]]) -> Iterator[None]:
    for parameter, group in rounded:
        whole = functools.partial(_gather_whole, parameter, group)
        values = Rounded(parameter._unsharded_param.detach(), whole, parameter._param_fqn)
        _put(parameter, nn.Parameter(values, requires_grad=False))
    try:
        yield
    finally:
        for parameter, _ in rounded:
            _put(parameter, parameter._unsharded_param)


def _put(parameter: Any, value: nn.Parameter) -> None:
    for holder, name in _holders(parameter):
        holder._parameters[name] = value  # torch: Module._parameters


def check_uses(graph: GraphModule, model: nn.Module) -> None:
    """Checks that a graph uses the 16-bit weights of compiled blocks as their layers do.

    Args:
        graph: made by dynamo.
        model: sharded by `fully_shard`.

    Raises:
        RuntimeError: another operation uses one.
    """
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    parameters = [p for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]
    # torch: FSDPParam.param_dtype
    rounded = {id(getattr(p, "_unsharded_param", None)): p for p in parameters if p.param_dtype is not None}
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")  # torch: what dynamo's graph is called with
        parameter = rounded.get(id(argument.example)) if argument is not None and argument.is_tensor else None
        other = None if parameter is None else _other_use(graph, node)
        if parameter is not None and other is not None:
            raise RuntimeError(
                f"{other.stack_trace or other.target}: this uses {parameter._param_fqn!r} without its layer, which"
                f" under fsdp, mixed precision and compile is gathered in {parameter.param_dtype}: leave out compile,"
                " or choose strategy='ddp'."
            )


_LAYERS = {
    float8_linear,
    functional.linear,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
    functional.multi_head_attention_forward,
}
"""The functions that the layers of `_CAST` are in a graph; the first argument is the layer's input."""


def _other_use(graph: Any, value: Node) -> Node | None:
    """The first node that uses a weight in another way than as the weight or bias of a layer."""
    for node in value.users:
        other: Node | None = node
        if node.op == "call_method" and node.target == "to" and node.args[1:] == (torch.bfloat16,):
            other = None  # the values that are there
        elif node.target in _LAYERS:
            other = node if node.args[0] is value else None
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *arguments = node.args
            inner: Any = getattr(graph, body.target)  # type: ignore[arg-type, union-attr]
            places = zip(inner.graph.find_nodes(op="placeholder"), arguments, strict=True)
            other = next(
                filter(None, (_other_use(inner, place) for place, argument in places if argument is value)), None
            )
        if other is not None:
            return other
    return None
