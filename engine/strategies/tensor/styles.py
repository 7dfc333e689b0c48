"""Styles for `parallelize_module` that torch does not have.

Inside a region, DTensors flow through the user's code: `view`, `reshape` and the like see the sizes that the code was
written for, and the result is that of one process; torch inserts the collectives.
"""

import dis
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

# torch: the placement of several blocks of rows on each rank.
# torch: runs a module with other tensors in the place of its parameters.
from ..._compat.torch import (
    AsyncCollectiveTensor,
    _reparametrize_module,
    _StridedShard,
    tree_map_only,
)
from ..callers import CutError, is_users
from ..contents import Contents, in_tuples

__all__ = [
    "EmbeddingParallel",
    "Experts",
    "FusedColwise",
    "MisfitError",
    "Moved",
    "ParallelRegion",
    "PlainRowwise",
    "VocabParallel",
    "as_dtensor",
    "cause_of",
    "find_experts",
    "is_raised_by_dtensor",
    "may_be_dtensors",
    "refuse_second_backward",
    "replicate",
    "to_plain",
    "to_replica",
    "wrap_forward",
]


def to_plain(value: Any) -> Any:
    """Returns a nested value with whole plain tensors in place of DTensors: a collective for each sharded one."""
    return tree_map_only(DTensor, _whole, value)


def _whole(tensor: DTensor) -> Tensor:
    return _Leave.apply(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim))


_NO_DOUBLE_BACKWARD = """\
layers or sequences that are split can't give the gradient of a gradient, as create_graph=True needs, for example for \
a gradient penalty: choose another strategy, such as 'fsdp'."""


_MIXED_WITH_DETACHED = """\
under tensor parallelism the loss was multiplied by a number made of parameters that are split, without their \
gradient: take it as a plain number, float(...), or as `full_tensor()` of it."""


class _Leave(torch.autograd.Function):
    """Turns a replicated DTensor into a plain tensor. `DTensor.to_local` gives a view: no in-place write is allowed."""

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


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Has `run(module, forward, *args, **kwargs)` called in place of the forward of `module`.

    torch compiles a `functools.partial` for each module; modules of one class share the graph of a method.
    """
    if "forward" in vars(module):
        module.forward = functools.partial(run, module, module.forward)
        return
    forward = type(module).forward  # not bound: a copy of the module has to run its own

    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(module, functools.partial(forward, module), *args, **kwargs)

    module.forward = MethodType(method, module)


def refuse_second_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a split layer: a backward through it with ``create_graph=True`` raises a RuntimeError."""
    if torch.compiler.is_compiling():  # torch refuses it for all graphs
        return
    tree_map_only(Tensor, lambda tensor: tensor.register_hook(_refuse) if tensor.requires_grad else None, output)


def _refuse(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        # torch: DTensor's conversions are not differentiable twice: some terms would be silently missing.
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _plain_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: returns whole plain tensors in place of DTensors."""
    return to_plain(output)


def _cut_output(module: nn.Module, args: Any, output: Any) -> Any:
    def cut(tensor: DTensor) -> DTensor:
        if tensor.dim() < 3:
            return tensor
        if module.training and tensor.shape[1] % tensor.device_mesh.size():
            # On the CPU, dropout of unequal parts would draw unequal numbers of random values: then the ranks differ.
            raise ValueError(
                f"sequence_parallel=true needs sequences of equal parts for {tensor.device_mesh.size()} ranks, but the"
                f" output of {type(module).__name__} has a length of {tensor.shape[1]}: pad them, or leave it out."
            )
        return tensor.redistribute(placements=[Shard(1)])

    return tree_map_only(DTensor, cut, output)


class PlainRowwise(RowwiseParallel):
    """torch's `RowwiseParallel`, with a whole plain tensor as output."""

    def __init__(self, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_plain_output)
        return module


class ParallelRegion(ParallelStyle):
    """A sub-module in whose forward DTensors flow: inputs become DTensors, outputs whole plain tensors.

    Its parameters that no other style has split are replicated. The gradient of an input is summed over the ranks once,
    however many layers take it: that is the all-reduce of the backward pass.

    Args:
        by_sequence: inputs and outputs are DTensors that are sharded by their second dim, time: an all-gather at the
            beginning and a reduce-scatter at the end, together as many bytes as an all-reduce.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        super().__init__()
        self.by_sequence = by_sequence
        self.replacement: Callable[..., Any] | None = None
        """Called in place of the forward, with module, forward, args and kwargs; None: nothing is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh)

        arguments = _Arguments(self, device_mesh)
        module.register_forward_pre_hook(arguments.enter, with_kwargs=True)
        module.register_forward_hook(arguments.leave)
        module.register_forward_hook(_cut_output if self.by_sequence else _plain_output)
        wrap_forward(module, self._run)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.replacement is not None:
            return self.replacement(module, forward, args, kwargs)
        if torch.compiler.is_compiling():  # it can't trace what looks at an error's frames
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            # torch: operations that DTensor can't do may end in a failed assertion in DTensor.
            if not may_be_dtensors(error) or isinstance(error, (torch.OutOfMemoryError, MisfitError)):
                raise
            raise MisfitError(module, error) from error


class _Arguments:
    """The arguments of a region: their tensors are DTensors while it runs, those in lists and dicts as well.

    A list or dict stays the same object: a region may write into it, and so may what has it under another name.
    """

    def __init__(self, region: ParallelRegion, mesh: DeviceMesh) -> None:
        self._region, self._mesh = region, mesh
        self._roots: tuple[Any, ...] = ()
        self._before: dict[int, tuple[Tensor, Tensor, int]] = {}
        """The DTensors put into containers for the call, by id: the DTensor, what it replaces, its number of writes."""

    def _to_replica(self, value: Any) -> Any:
        return to_replica(value, self._mesh) if isinstance(value, Tensor) else value

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called before the forward."""
        values = (*args, *kwargs.values())
        has_containers = self._region.replacement is None and any(
            isinstance(value, (list, dict, tuple)) for value in values
        )
        self._roots = values if has_containers else ()
        if self._roots:
            contents = Contents((), (values,))
            held = [tensor for tensor, holder in contents.take_tensors() if isinstance(holder, (list, dict))]
            pairs = [(self._to_replica(tensor), tensor) for tensor in held]
            self._before = {id(new): (new, old, new._version) for new, old in pairs if new is not old}
            if self._before:
                contents.put({id(old): new for new, old, _ in self._before.values()})
        return in_tuples(self._to_replica, args), {k: in_tuples(self._to_replica, v) for k, v in kwargs.items()}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after the forward."""
        if self._roots:
            contents, self._roots = Contents((), (self._roots,)), ()
            back = {key: old for key, (new, old, version) in self._before.items() if new._version == version}
            for tensor, holder in contents.take_tensors():
                if isinstance(holder, (list, dict)) and isinstance(tensor, DTensor) and id(tensor) not in back:
                    back[id(tensor)] = to_plain(tensor)
            if back:
                contents.put(back)
            self._before = {}


class MisfitError(RuntimeError):
    """The forward of a region fails with DTensors.

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
    """Returns the message of an error in one line, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__


def may_be_dtensors(error: Exception) -> bool:
    """Whether `error` may come from an operation of DTensor's, which may fail in any way, or on the local tensors."""
    if isinstance(error, CutError):  # a refusal
        return False
    return is_raised_by_dtensor(error) or (isinstance(error, RuntimeError) and not _is_raised_by_user(error))


def is_raised_by_dtensor(error: Exception) -> bool:
    """Whether it was torch's DTensor that raised `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.distributed.tensor.")


def _is_raised_by_user(error: Exception) -> bool:
    """Whether a ``raise`` in the user's code raised `error`: an operation of torch's has no frame of its own."""
    end = error.__traceback__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    if end is None or not is_users(end.tb_frame):
        return False
    return end.tb_frame.f_code.co_code[end.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turns the parameters of `module` that are not DTensors yet into replicated ones."""
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                submodule.register_parameter(name, _dtensor_parameter(parameter, parameter.detach(), mesh, Replicate()))


def to_replica(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns `tensor` as a DTensor that is replicated on `mesh`; integers, which have no gradient, stay plain."""
    if not tensor.is_floating_point():
        return tensor
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()])
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


class Moved(torch.autograd.Function):
    """A DTensor redistributed, with parts that are contiguous, as it says.

    Kernels of attention lay results and gradients out as [batch, time, heads, dim]. torch's `redistribute` makes others
    of them, but keeps the strides that the tensor has as a whole, and a later view of the parts fails.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placement: Any) -> DTensor:
        """Called by `apply`."""
        ctx.placement = tensor.placements[0]
        return _moved(tensor, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        """Called by torch."""
        return _moved(gradient, Replicate() if ctx.placement.is_partial() else ctx.placement), None


def _moved(tensor: DTensor, placement: Any) -> DTensor:
    return _contiguous(_contiguous(tensor).redistribute(placements=[placement]))


def _contiguous(tensor: DTensor) -> DTensor:
    stride = torch.empty(tensor.shape, device="meta").stride()
    local = tensor.to_local().contiguous()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=stride
    )


def as_dtensor(tensor: Tensor, mesh: Any) -> Any:
    """Returns a DTensor as it is, and a plain tensor as a replica of all ranks."""
    return tensor if isinstance(tensor, DTensor) else to_replica(tensor, mesh)


class FusedColwise(ParallelStyle):
    """Splits a Linear whose output is `num_parts` equal parts side by side, such as q, k and v: splits each part.

    Of T ranks, rank t has rows t n/T to (t + 1) n/T of each part of n rows, in one tensor.

    Args:
        num_parts: number of parts of the output.
        cuts_bias: split the bias as the weight; else each rank has all of it, one element a row, and sums its
            gradient. FSDP2 could not shard such a bias once more.
    """

    def __init__(self, num_parts: int, *, cuts_bias: bool = True) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.cuts_bias = cuts_bias

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        placement = _StridedShard(0, split_factor=self.num_parts)
        weight, bias = module.weight, module.bias
        own_rows = self._own_rows(weight.detach(), device_mesh).clone()
        module.weight = _dtensor_parameter(weight, own_rows, device_mesh, placement)
        if bias is not None and self.cuts_bias:
            own_rows = self._own_rows(bias.detach(), device_mesh).clone()
            module.bias = _dtensor_parameter(bias, own_rows, device_mesh, placement)
        elif bias is not None:
            module.bias = _dtensor_parameter(bias, bias.detach(), device_mesh, Replicate())
        wrap_forward(module, self._forward)
        return module

    def _own_rows(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        return whole.unflatten(0, (self.num_parts, mesh.size(), -1))[:, mesh.get_local_rank()].flatten(0, 1)

    def _forward(self, module: nn.Linear, forward: Callable[..., Any], input: Tensor) -> DTensor:
        # On local tensors: by DTensors, torch would gather the weights for the gradient of the input.
        weight: Any = module.weight
        bias: Any = module.bias
        mesh = weight.device_mesh
        if bias is not None and self.cuts_bias:
            bias = bias.to_local()
        elif bias is not None:
            bias = self._own_rows(bias.to_local(grad_placements=[Partial()]), mesh)
        replica: Any = to_replica(input, mesh)
        local = nn.functional.linear(replica.to_local(grad_placements=[Partial()]), weight.to_local(), bias)
        placement = _StridedShard(local.dim() - 1, split_factor=self.num_parts)
        return DTensor.from_local(local, mesh, [placement], run_check=False)


class VocabParallel(ParallelStyle):
    """Splits the output layer by the vocabulary. The logits are gathered; with `loss_parallel`, not while training."""

    def __init__(self, loss_parallel: bool, by_sequence: bool = False) -> None:
        super().__init__()
        self.loss_parallel = loss_parallel
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = ColwiseParallel(input_layouts=Shard(1) if self.by_sequence else None, use_local_output=False)
        split.src_data_rank = self.src_data_rank
        module = split._apply(module, device_mesh)

        def leave(submodule: nn.Module, args: Any, output: DTensor) -> Tensor:
            return output if self.loss_parallel and submodule.training else to_plain(output)

        module.register_forward_hook(leave)
        return module


def _dtensor_parameter(whole: Tensor, local: Tensor, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    """Returns a DTensor parameter of the shape of `whole`, whose part on this rank is `local`."""
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


class EmbeddingParallel(RowwiseParallel):
    """Splits an embedding [rows, width] by its rows. The row ``padding_idx`` of the whole table gets no gradient.

    Args:
        by_sequence: the output stays a DTensor that is sharded by its second dim; else it is a plain tensor.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        output = Shard(1) if by_sequence else Replicate()
        super().__init__(input_layouts=Replicate(), output_layouts=output, use_local_output=False)
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module.padding_idx is not None:
            # torch: its backward would count padding_idx within this rank's rows, not within the whole table.
            wrap_forward(module, _without_padding)
            module.register_forward_hook(_stop_at_padding)
        if not self.by_sequence:
            module.register_forward_hook(_plain_output)
        return module


def _without_padding(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    index, module.padding_idx = module.padding_idx, None
    try:
        return forward(*args, **kwargs)
    finally:
        module.padding_idx = index


def _stop_at_padding(module: Any, args: Any, output: Tensor) -> Tensor:
    is_padding = (args[0] == module.padding_idx).unsqueeze(-1)
    return torch.where(is_padding, output.detach(), output)


# Splits experts whose weights are 3-D parameters, [expert, out, in], such as those of Mixtral in transformers.
#
# Every rank has some hidden units of each expert: rows of both halves of ``gate_up_proj`` (gate and up projection, side
# by side), and columns of ``down_proj``. It runs the module's own forward on these, as plain tensors; the outputs of
# the ranks are summed. Communication: one all-reduce in forward, and one in backward for each input that has a
# gradient.
#
# The shapes do not show in which order such parameters hold their elements (some models interleave gate and up), so
# they are split only where the model says so: by the `_tp_plan` that transformers gives to its models.

_UP, _DOWN = "gate_up_proj", "down_proj"
_STYLES = {_UP: "packed_colwise", _DOWN: "rowwise"}
"""The styles of transformers' plans that are split here."""


class Experts(ParallelStyle):
    """Splits a module with ``gate_up_proj`` [experts, 2 hidden, in] and ``down_proj`` [experts, out, hidden].

    Args:
        by_sequence: activations between the split layers are DTensors, and so is the output.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        super().__init__()
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        up, down = module.get_parameter(_UP), module.get_parameter(_DOWN)
        own_rows = up.detach().unflatten(1, (2, size, -1))[:, :, rank].flatten(1, 2).clone()
        own_columns = down.detach().unflatten(2, (size, -1))[:, :, rank].clone()
        module.register_parameter(_UP, _dtensor_parameter(up, own_rows, device_mesh, _StridedShard(1, split_factor=2)))
        module.register_parameter(_DOWN, _dtensor_parameter(down, own_columns, device_mesh, Shard(2)))
        self._mesh = device_mesh
        wrap_forward(module, self._forward)
        return module

    def _forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mesh = self._mesh

        def local_input(tensor: Tensor) -> Tensor:
            replica = to_replica(tensor, mesh)
            return replica.to_local(grad_placements=[Partial()]) if isinstance(replica, DTensor) else replica

        args, kwargs = tree_map_only(Tensor, local_input, (args, kwargs))
        parameters: Any = module.named_parameters()  # DTensors
        local_parameters = {name: parameter.to_local() for name, parameter in parameters}
        with _reparametrize_module(module, local_parameters):
            output = forward(*args, **kwargs)
        whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return to_replica(whole, mesh) if self.by_sequence else to_plain(whole)


def find_experts(module: nn.Module, num_ranks: int) -> Iterator[tuple[str, str]]:
    """Yields the names of the expert modules in transformers' plans, each with the reason not to split it, or ""."""
    for path, model in module.named_modules():
        plan = getattr(model, "_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        for pattern in (key for key, style in plan.items() if style == "moe_tp_experts"):
            for name, submodule in model.named_modules():
                if fnmatchcase(name, pattern):
                    yield f"{path}.{name}".lstrip("."), _why_whole(submodule, plan, pattern, num_ranks)


def _why_whole(submodule: nn.Module, plan: Mapping[str, Any], pattern: str, num_ranks: int) -> str:
    shapes = {key: parameter.shape for key, parameter in submodule.named_parameters()}
    styles = {key: plan.get(f"{pattern}.{key}") for key in shapes}
    if styles != _STYLES or any(len(shape) != 3 for shape in shapes.values()):
        plan_text = ", ".join(f"{key} {style!r}" for key, style in styles.items())
        return f"transformers' plan for its parameters is not known here ({plan_text})"
    hidden = shapes[_DOWN][2]
    if shapes[_UP][1] != 2 * hidden:
        return f"{_UP} has {shapes[_UP][1]} rows for {hidden} hidden units"
    return f"{hidden} hidden units are no multiple of {num_ranks}" if hidden % num_ranks else ""
