"""Sharding rules of DTensor for operators where torch has none, or one that is wrong for the placements used here."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

# torch: the types of its sharding rules. A `_StridedShard` is the placement of several blocks of rows on each rank.
from .._compat.torch import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    TupleStrategy,
    _StridedShard,
    tree_leaves,
    tree_map_only,
)
from .whole_steps import on_whole

__all__ = ["install_operator_rules", "install_reductions", "restore_operator_rules"]

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_LOSSES = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
"""Losses of each element, with the place of the argument `reduction`."""
_ON_WHOLE = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
"""Operators of which torch adds up what it may not: means over the samples that count."""
_ELEMENTWISE_BACKWARD = (
    *(aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.hardtanh_backward.default),
    *(aten.hardshrink_backward.default, aten.softshrink_backward.default),
)
_LOSSES_BACKWARD = (
    *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.binary_cross_entropy_backward.default),
    *(aten.huber_loss_backward.default, aten.soft_margin_loss_backward.default),
)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.view_copy.default, aten.reshape.default)


_dispatcher: Any = DTensor._op_dispatcher
_handlers = _dispatcher._custom_op_handlers  # torch: functions that run an operator in place of its own dispatch
_rules = _dispatcher.sharding_propagator.op_strategy_funcs


def install_reductions() -> None:
    """Installs the rules for sums, means and truth values in DTensor, until `restore_operator_rules`.

    They hold wherever a program meets a DTensor: in a layer whose weights are split, and in a hook or an optimizer.
    """
    _register_losses()
    _wrap(_sum, _SUMS)
    _wrap(_any, _ANY)


def install_operator_rules() -> None:
    """Installs the rules below, for activations that are split, too."""
    _register_attention()
    _register_chunked_loss()
    _register_activations()
    _replace(_handlers, dict.fromkeys((_ATTENTION, _ATTENTION_BACKWARD), _with_mask_cut))
    _replace(_handlers, {aten.fill_.Scalar: _fill})
    _replace(_handlers, dict.fromkeys(_random_operators(), _draw))
    _wrap(_scan, _SCANS)
    _wrap(_on_whole, _ON_WHOLE)
    _wrap(_view, _VIEWS)
    if aten.cat.default in _rules:
        _wrap(_cat, (aten.cat.default,))


def _wrap(rule: Callable[..., Any], operators: tuple[Any, ...]) -> None:
    _replace(_rules, {operator: functools.partial(rule, _rules[operator]) for operator in operators})


def _replace(table: dict[Any, Any], rules: dict[Any, Any]) -> None:
    for operator, rule in rules.items():
        if operator not in _replaced:
            _replaced[operator] = table, table.get(operator)
            table[operator] = rule


def restore_operator_rules() -> None:
    """Restores torch's rules. Rules for operators where torch has none stay."""
    for operator, (table, rule) in _replaced.items():
        if rule is None:
            del table[operator]
        else:
            table[operator] = rule
    _replaced.clear()


_replaced: dict[Any, tuple[dict[Any, Any], Any]] = {}
"""The replaced rule of torch for an operator, with its table; None: it has none there."""


@functools.cache
def _register_attention() -> None:
    """Registers rules for the attention kernel of CPUs; torch has them for the kernels of GPUs only."""
    register_sharding(_ATTENTION)(_attention)
    register_sharding(_ATTENTION_BACKWARD)(_attention_backward)


def _attention(query: Any, key: Any, value: Any, *args: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """The placements of forward: whole, by batch or by heads; q, k, v: [batch, heads, time, dim]."""
    return [([p, p], [p, p, p, *_mask_placements(attn_mask, p)]) for p in (Replicate(), Shard(0), Shard(1))]


def _attention_backward(*args: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """The placements of backward: six tensors in, the gradients of q, k and v out."""
    return [([p] * 3, [p] * 6 + _mask_placements(attn_mask, p)) for p in (Replicate(), Shard(0), Shard(1))]


def _mask_placements(mask: Any, placement: Any) -> list[Any]:
    if mask is None:
        return []
    is_cut = isinstance(placement, Shard) and mask.ndim == 4 and mask.shape[placement.dim] > 1
    return [placement if is_cut else Replicate()]


@functools.cache
def _register_chunked_loss() -> None:
    """Registers a rule for `linear_cross_entropy` in chunks, for which torch has none: each rank has all of it."""
    import torch.nn.modules.linear_cross_entropy  # defines the operator

    register_sharding(torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default)(_chunked_loss)


def _chunked_loss(x: Any, weight: Any, target: Any, bias: Any, class_weights: Any, *rest: Any) -> Any:
    tensors = [None if tensor is None else Replicate() for tensor in (x, weight, target, bias, class_weights)]
    return [([Replicate()] * 4, tensors + [None] * len(rest))]


@functools.cache
def _register_losses() -> None:
    """Registers rules for losses: torch takes the mean of the parts' means, however many values each part has.

    In backward it divides a rank's part by the number of its own values.
    """
    for operator, place in _LOSSES.items():
        register_sharding(operator)(functools.partial(_loss, place))
    for operator in _LOSSES_BACKWARD:
        register_sharding(operator)(_of_whole)


def _loss(place: int, x: Any, *rest: Any) -> Any:
    reduction = rest[place - 1] if len(rest) >= place else 1
    tensors = [argument for argument in (x, *rest) if isinstance(argument, DTensorSpec)]
    is_x_largest = all(torch.broadcast_shapes(tensor.shape, x.shape) == x.shape for tensor in tensors)
    even = [dim for dim in range(x.ndim) if x.shape[dim] % x.mesh.size() == 0]
    return _of_whole(x, *rest) + [
        (
            [{1: Partial("avg"), 2: Partial("sum")}.get(reduction, Shard(dim))],
            [_part(argument, dim - x.ndim) if isinstance(argument, DTensorSpec) else None for argument in (x, *rest)],
        )
        for dim in even * is_x_largest
    ]


def _part(tensor: DTensorSpec, dim: int) -> Placement:
    """The placement of a tensor beside one that is split along a dim, counted from the end, to whose shape it grows."""
    is_split = tensor.ndim >= -dim and tensor.shape[dim] > 1
    return Shard(tensor.ndim + dim) if is_split else Replicate()


def _of_whole(*args: Any) -> Any:
    return [([Replicate()], [Replicate() if isinstance(argument, DTensorSpec) else None for argument in args])]


@functools.cache
def _register_activations() -> None:
    """Registers rules for the backward of activation functions and of a few others, for which torch has none."""
    for operator in _ELEMENTWISE_BACKWARD:
        register_sharding(operator)(_elementwise_backward)
    register_sharding(aten._prelu_kernel_backward.default)(_prelu_backward)
    register_sharding(aten.avg_pool2d_backward.default)(_of_whole)
    register_sharding(aten.put.default)(_of_whole)


def _elementwise_backward(gradient: Any, x: Any, *numbers: Any) -> Any:
    placements = (Replicate(), *map(Shard, range(x.ndim)))
    return [([p], [p, p] + [None] * len(numbers)) for p in placements]


def _prelu_backward(gradient: Any, x: Any, weight: Any) -> Any:
    """Weights: [1, channels, 1, ...], of as many dims as the input."""
    splits = [([p, p], [p, p, _part(weight, p.dim - x.ndim)]) for p in map(Shard, range(x.ndim))]
    return [([Replicate()] * 2, [Replicate()] * 3), *splits]


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Writes a number: of a sum over ranks into one part, and zeros into the others, where torch writes it into all."""
    tensor, value = args
    axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_partial("sum")]
    coordinates = tensor.device_mesh.get_coordinate() or ()
    operator(tensor._local_tensor, 0 if any(coordinates[axis] for axis in axes) else value)
    return tensor


@functools.cache
def _random_operators() -> tuple[Any, ...]:
    """Returns the operators that draw random numbers. Attention has its own rules; composite ones call these."""
    packets = [getattr(aten, name) for name in dir(aten) if "attention" not in name]
    operators = [
        getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()
    ]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return tuple(
        operator
        for operator in operators
        if torch.Tag.nondeterministic_seeded in operator.tags and not operator.has_kernel_for_dispatch_key(composite)
    )


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the random numbers of one process: each rank those of the whole tensor, of which it keeps its part.

    torch would draw the same numbers for each part. On GPUs, where it has other ones for each, its way is kept for the
    operators that it knows: nothing has to be gathered.
    """
    first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    if first.device.type != "cpu" and operator in DTensor._op_dispatcher._random_ops:
        return _as_torch(operator, args, kwargs)
    result = on_whole(operator, args, kwargs)
    if result is first:
        return result
    placements = [Replicate() if placement.is_partial() else placement for placement in first.placements]
    return tree_map_only(
        DTensor,
        lambda tensor: tensor.redistribute(placements=placements) if tensor.shape == first.shape else tensor,
        result,
    )


def _as_torch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    dispatcher.sharding_propagator.propagate(call)
    sharding: Any = call.output_sharding
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, call)
    return args[0] if operator._schema.is_mutable else dispatcher.wrap(local, sharding.output_spec)


def _first(schema: OpSchema) -> DTensorSpec:
    """Returns the placements, and the shape, of an operator's first argument."""
    tensor = schema.args_schema[0]
    assert isinstance(tensor, OpStrategy)
    return tensor.strategies[0].output_spec


def _sum(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for sums, which adds norms of parts as if they were parts of the norm."""
    is_of_norms = any(p.is_partial() and type(p) is not Partial for p in _first(schema).placements)
    return _on_whole(rule, schema) if is_of_norms else rule(schema)


def _any(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for whether any is true, which adds the truth values of the parts."""
    if any(placement.is_partial() for placement in _first(schema).placements):
        return _on_whole(rule, schema)
    result = rule(schema)
    for option in result.strategies:
        spec = option.output_spec
        spec.placements = tuple(Partial("max") if p.is_partial() else p for p in spec.placements)
    return result


def _scan(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for sums of all values before one, which takes a dim that is counted from the end for another."""
    tensor, dim, *rest = schema.args_schema
    assert isinstance(tensor, OpStrategy)
    return rule(OpSchema(schema.op, (tensor, int(dim) % tensor.ndim, *rest), schema.kwargs_schema))  # type: ignore[call-overload]


def _on_whole(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for tensors that each rank has whole."""
    return rule(OpSchema(schema.op, tuple(map(_as_whole, schema.args_schema)), schema.kwargs_schema))


def _as_whole(argument: Any) -> Any:
    if not isinstance(argument, OpStrategy):
        return argument
    spec = argument.strategies[0].output_spec
    return OpStrategy([OpSpec(DTensorSpec(spec.mesh, (Replicate(),) * len(spec.placements), spec.tensor_meta))])


def _with_mask_cut(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `operator` as DTensor does, by the rules above, and shards the mask, such as T5's positions, too.

    torch 2.13 does not shard keyword arguments: each rank would have its own heads, but the mask of all heads.
    """
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    dispatcher.sharding_propagator.propagate(call)
    sharding: Any = call.output_sharding
    mask = kwargs.get("attn_mask")
    if mask is not None:
        if not isinstance(mask, DTensor):
            mask = DTensor.from_local(mask, call.compute_mesh, [Replicate()], run_check=False)
        [placement] = _mask_placements(mask, sharding.output_spec[0].placements[0])
        call.local_kwargs["attn_mask"] = mask.redistribute(placements=[placement]).to_local()
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, call)
    return dispatcher.wrap(local, sharding.output_spec)


def _view(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for views; gathers q, k and v side by side where torch's rule is wrong, or fails.

    In torch 2.13 a view that splits or joins the dim of a `_StridedShard` often keeps that placement although the rank
    then has other elements, for example ``[..., 3 * heads * size]`` as ``[..., heads, 3 * size]``. torch's rule is
    right if the blocks become a separate dim, and the sharded dim gets an ordinary `Shard`.
    """
    spec, size = _first(schema), schema.args_schema[1]
    in_blocks = [i for i, placement in enumerate(spec.placements) if isinstance(placement, _StridedShard)]
    try:
        result = rule(schema)
        after: Any = result.strategies[0].output_spec.placements
        if all(_is_kept(spec, i, after[i], size) for i in in_blocks):
            return result
    except (RuntimeError, KeyError):  # also of a view that joins the unequal parts of a dim with another dim
        if all(placement.is_replicate() for placement in spec.placements):
            raise
    return _on_whole(rule, schema)


def _is_kept(spec: DTensorSpec, axis: int, after: Placement, size: Any) -> bool:
    """Whether a view to `size` leaves the dim of a `_StridedShard` as it is, or turns it into another placement."""
    if not isinstance(after, _StridedShard):
        return True
    sizes = [spec.shape.numel() // -math.prod(size) if length == -1 else length for length in size]
    dim = spec.placements[axis].dim  # type: ignore[attr-defined]
    return spec.shape[dim] == sizes[after.dim] and math.prod(spec.shape[:dim]) == math.prod(sizes[: after.dim])


def _cat(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for `cat`, without tensors of shape [0], which `cat` skips. A cache of keys starts as such a tensor.

    torch 2.13 takes the number of dims from the first tensor, even if the other tensors have more dims. torch 2.15 does
    not; its rule is in another place.
    """
    tensors, *rest = schema.args_schema
    assert isinstance(tensors, TupleStrategy)
    children: Any = tensors.children
    is_kept = [child.shape != (0,) for child in children]
    if all(is_kept) or not any(is_kept):
        return rule(schema)
    kept = TupleStrategy([child for child, keep in zip(children, is_kept, strict=True) if keep])
    result = rule(OpSchema(schema.op, (kept, *rest), schema.kwargs_schema))
    for option in result.strategies:
        specs, costs = iter(option.input_specs), iter(option.redistribute_cost)
        whole = (Replicate(),) * len(option.output_spec.placements)
        option.input_specs = tuple(
            next(specs) if keep else DTensorSpec(child.mesh, whole, child.strategies[0].output_spec.tensor_meta)
            for child, keep in zip(children, is_kept, strict=True)
        )
        option.redistribute_cost = [next(costs) if keep else [0.0] for keep in is_kept]
    return result
