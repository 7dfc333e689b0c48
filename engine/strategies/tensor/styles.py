"""Styles for `parallelize_module` that torch has none for.

Inside a region, DTensors flow through the user's code: `view`, `reshape` and the like see the sizes that the code was
written for, and whatever it computes is what one process would compute, cut or not; torch sends what is needed.
"""

import functools
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# torch: what a collective that is under way returns.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# torch: what its rules for operators take and give; its rule for views is wrong for several blocks of rows.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

# torch: the placement of several blocks of rows on each rank, which FSDP2 uses on top of tensor parallelism.
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import tree_map_only

__all__ = [
    "FusedColwise",
    "MisfitError",
    "Region",
    "Rows",
    "Vocabulary",
    "cause_of",
    "distributed",
    "entering",
    "plain_output",
    "raised_by_dtensor",
    "refuse_second_backward",
    "replicate",
    "to_plain",
]


def to_plain(value: Any) -> Any:
    """`value`, any nested one, with whole tensors in place of DTensors; a collective for those that are cut."""
    return tree_map_only(DTensor, _whole, value)


def _whole(tensor: DTensor) -> Tensor:
    return _Leave.apply(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim))


_NO_DOUBLE_BACKWARD = """\
tensor parallelism can't give the gradient of a gradient, as create_graph=True asks for, say for a gradient penalty: \
choose another strategy, such as 'fsdp'."""


_MIXED_WITH_DETACHED = """\
under tensor parallelism the loss was multiplied by a number made of parameters that are split, without their \
gradient: take it as a plain number, float(...), or as `full_tensor()` of it."""


class _Leave(torch.autograd.Function):
    """A replica becomes a tensor. `DTensor.to_local` gives a view, which must not be changed in place."""

    @staticmethod
    def forward(ctx: Any, replica: DTensor) -> Tensor:
        ctx.spec = replica.device_mesh, replica.placements
        local = replica.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        if isinstance(gradient, DTensor):
            raise RuntimeError(_MIXED_WITH_DETACHED)
        return DTensor.from_local(gradient, *ctx.spec, run_check=False)


def refuse_second_backward(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of a split layer: a backward through it with ``create_graph=True`` raises a RuntimeError."""
    tree_map_only(Tensor, lambda tensor: tensor.register_hook(_refuse) if tensor.requires_grad else None, output)


def _refuse(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        # torch: DTensor's conversions are not differentiable twice; some terms would be left out, silently.
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def plain_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: whole tensors in place of DTensors."""
    return to_plain(output)


def _cut_output(module: nn.Module, args: Any, output: Any) -> Any:
    def cut(tensor: DTensor) -> DTensor:
        if tensor.dim() < 3:
            return tensor
        if module.training and tensor.shape[1] % tensor.device_mesh.size():
            # Ranks would draw unequal numbers for dropout on the CPU, and then others where all draw for the same.
            raise ValueError(
                f"sequence_parallel=true needs sequences of equal parts for {tensor.device_mesh.size()} ranks, but the"
                f" output of {type(module).__name__} has a length of {tensor.shape[1]}: pad them, or leave it out."
            )
        return tensor.redistribute(placements=[Shard(1)])

    return tree_map_only(DTensor, cut, output)


class Rows(RowwiseParallel):
    """torch's, with a whole tensor as output."""

    def __init__(self, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(plain_output)
        return module


class Region(ParallelStyle):
    """A sub-module in whose forward DTensors flow: what goes in becomes one, what comes out is whole.

    Parameters in it that no other style has cut are replicated. The gradient of an input is summed over the ranks once,
    however many layers take it: that is the all-reduce of the backward pass.

    Args:
        by_sequence: what goes in and out is cut by its second dim, time, and stays a DTensor: an all-gather at the
            beginning and a reduce-scatter at the end, of as many bytes as an all-reduce.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        super().__init__()
        self.by_sequence = by_sequence
        self.instead: Callable[..., Any] | None = None
        """The function that replaces the forward, given the forward, its arguments, and those by name; or None."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: entering(tensor, device_mesh), (args, kwargs))

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(_cut_output if self.by_sequence else plain_output)
        module.forward = functools.partial(self._run, module, module.forward)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.instead is not None:
            return self.instead(forward, args, kwargs)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            # torch: some of what DTensor can't do ends in an assertion of its own.
            is_torchs = raised_by_dtensor(error) or isinstance(error, RuntimeError)
            if not is_torchs or isinstance(error, (torch.OutOfMemoryError, MisfitError)):
                raise
            raise MisfitError(module, error) from error


class MisfitError(RuntimeError):
    """The forward of a region does not go with DTensors.

    Attributes:
        region: the module.
    """

    def __init__(self, region: nn.Module, error: Exception) -> None:
        self.region = region
        super().__init__(
            f"the forward of {type(region).__name__} does not go with the derived tensor-parallel plan, under which its"
            f" layers give DTensors: {cause_of(error)}\nGive the module a method tensor_parallel_plan()"
            " that leaves it out, or splits it in another way."
        )


def cause_of(error: BaseException | None) -> str:
    """Its message in one line, or its type."""
    return " ".join(str(error).split()) or type(error).__name__


def raised_by_dtensor(error: Exception) -> bool:
    """Whether it was torch's DTensor that raised `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.distributed.tensor.")


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors of those parameters of `module` that are none."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                part.register_parameter(name, distributed(parameter, parameter.detach(), mesh, Replicate()))


def entering(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """`tensor` as a replica on the ranks of `mesh`; integers, which have no gradient, stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()])
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


class FusedColwise(ParallelStyle):
    """A Linear whose output is `num_parts` equal parts side by side, such as q, k and v: each is cut, not the whole.

    Rank t of T has rows t n/T to (t + 1) n/T of each of the parts' n rows, in one tensor.

    Args:
        num_parts: how many.
        cuts_bias: as the weights; else each rank has all of it, one number a row, and gathers its gradient. FSDP2 could
            not cut such a bias once more.
    """

    def __init__(self, num_parts: int, *, cuts_bias: bool = True) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.cuts_bias = cuts_bias

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        placement = _StridedShard(0, split_factor=self.num_parts)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def mine(whole: Tensor) -> Tensor:
            return whole.detach().unflatten(0, (self.num_parts, size, -1))[:, rank].flatten(0, 1).clone()

        weight, bias = module.weight, module.bias
        module.weight = distributed(weight, mine(weight), device_mesh, placement)
        if bias is not None and self.cuts_bias:
            module.bias = distributed(bias, mine(bias), device_mesh, placement)
        elif bias is not None:
            module.bias = distributed(bias, bias.detach(), device_mesh, Replicate())
        module.forward = functools.partial(self._forward, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _forward(self, module: nn.Linear, mesh: DeviceMesh, input: Tensor) -> DTensor:
        # By hand: torch would gather these weights for the gradient of the input.
        weight: Any = module.weight
        bias: Any = module.bias
        replica: Any = entering(input, mesh)
        local = nn.functional.linear(
            replica.to_local(grad_placements=[Partial()]),
            weight.to_local(),
            None if bias is None else bias.redistribute(placements=weight.placements).to_local(),
        )
        placement = _StridedShard(local.dim() - 1, split_factor=self.num_parts)
        return DTensor.from_local(local, mesh, [placement], run_check=False)


class Vocabulary(ParallelStyle):
    """The output layer, cut by the vocabulary. Its logits are gathered; with `loss_parallel`, not while training."""

    def __init__(self, loss_parallel: bool, by_sequence: bool = False) -> None:
        super().__init__()
        self.loss_parallel = loss_parallel
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = ColwiseParallel(input_layouts=Shard(1) if self.by_sequence else None, use_local_output=False)
        split.src_data_rank = self.src_data_rank
        module = split._apply(module, device_mesh)

        def leave(part: nn.Module, args: Any, output: DTensor) -> Tensor:
            return output if self.loss_parallel and part.training else to_plain(output)

        module.register_forward_hook(leave)
        return module


def distributed(whole: Tensor, local: Tensor, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    """A parameter that is `whole`, of which this rank has `local`."""
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


aten = torch.ops.aten


# torch has rules for the attention kernels of GPUs only.
@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(query: Any, key: Any, value: Any, *args: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """Cut by nothing, batch or heads: all of [batch, heads, time, dim], but for the sums, [batch, heads, time]."""
    return [([p, p], [p, p, p, *_of_mask(attn_mask, p)]) for p in (Replicate(), Shard(0), Shard(1))]


@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(*args: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """Six tensors in, the gradients of three out."""
    return [([p] * 3, [p] * 6 + _of_mask(attn_mask, p)) for p in (Replicate(), Shard(0), Shard(1))]


def _of_mask(mask: Any, placement: Any) -> list[Any]:
    if mask is None:
        return []
    is_cut = isinstance(placement, Shard) and mask.ndim == 4 and mask.shape[placement.dim] > 1
    return [placement if is_cut else Replicate()]


def _with_mask_cut(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's way to run `operator`, by the rules above, with a mask of all heads, such as T5's positions, cut too.

    torch 2.13 cuts no keyword arguments: each rank would have its own heads, and the mask of all of them.
    """
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    dispatcher.sharding_propagator.propagate(call)
    sharding: Any = call.output_sharding
    mask = kwargs.get("attn_mask")
    if mask is not None:
        if not isinstance(mask, DTensor):
            mask = DTensor.from_local(mask, call.compute_mesh, [Replicate()], run_check=False)
        [wanted] = _of_mask(mask, sharding.output_spec[0].placements[0])
        call.local_kwargs["attn_mask"] = mask.redistribute(placements=[wanted]).to_local()
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, call)
    return dispatcher.wrap(local, sharding.output_spec)


# torch: what takes the place of its own way to run an operator.
_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
for _operator in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
):
    _handlers[_operator] = _with_mask_cut


def _view(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for views; q, k and v side by side are gathered where it would give a wrong result, or none.

    In torch 2.13 a `_StridedShard` of a dim that is split, or joined to others, often keeps its name although the
    numbers are other ones: ``[..., 3 * heads * size]`` as ``[..., heads, 3 * size]``, say. It is right where the blocks
    become a dim of their own, and what is cut an ordinary `Shard`.
    """
    tensor, size, *rest = schema.args_schema
    assert isinstance(tensor, OpStrategy)
    spec = tensor.strategies[0].output_spec
    in_blocks = [i for i, placement in enumerate(spec.placements) if isinstance(placement, _StridedShard)]
    try:
        result = rule(schema)
        after: Any = result.strategies[0].output_spec.placements
        if all(_is_kept(spec, i, after[i], size) for i in in_blocks):
            return result
    except (RuntimeError, KeyError):
        if not in_blocks:
            raise
    whole = DTensorSpec(spec.mesh, (Replicate(),) * len(spec.placements), spec.tensor_meta)
    return rule(OpSchema(schema.op, (OpStrategy([OpSpec(whole)]), size, *rest), schema.kwargs_schema))


def _is_kept(spec: DTensorSpec, axis: int, after: Placement, size: Any) -> bool:
    """Whether a view to `size` leaves the dim as it is that has several blocks on each rank, or ends that."""
    if not isinstance(after, _StridedShard):
        return True
    sizes = [spec.shape.numel() // -math.prod(size) if each == -1 else each for each in size]
    dim = spec.placements[axis].dim  # type: ignore[attr-defined]
    return spec.shape[dim] == sizes[after.dim] and math.prod(spec.shape[:dim]) == math.prod(sizes[: after.dim])


def _cat(rule: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
    """torch's rule for `cat`, without the tensors of shape [0], which `cat` skips: a cache of keys begins as one.

    torch 2.13 takes the number of dims from the first tensor, whatever the others have; 2.15 does not, and has its rule
    in another place.
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


_rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
if aten.cat.default in _rules:
    _rules[aten.cat.default] = functools.partial(_cat, _rules[aten.cat.default])
for _operator in (aten.view.default, aten._unsafe_view.default, aten.view_copy.default, aten.reshape.default):
    _rules[_operator] = functools.partial(_view, _rules[_operator])
