"""`tp`, `fsdp+tp` and `hsdp+tp`: the layers of a module split over ranks that have the same samples.

Uses torch's DTensor and `parallelize_module`
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html) with the plan of `plan.py`. Under `fsdp+tp` and
`hsdp+tp` FSDP2 shards the split parameters over the ranks with other samples: the axis `tp` of the mesh is innermost,
where links are fastest.

Communication per micro-batch over the T ranks of `tp`, with activations of A bytes:
1. forward: an all-reduce of A for each MLP, each attention, and the embedding; an all-gather of the logits;
2. backward: an all-reduce of A for each MLP, each attention, and the output layer. Each blocks: nothing overlaps it.
   With `sequence_parallel`, an all-gather and a reduce-scatter in the place of each all-reduce;
3. per optimizer step: an all-reduce of the gradient of each replicated parameter that each rank uses for a part of the
   work (norms of heads; with `sequence_parallel` all norms). Other replicated parameters get the same gradient on all
   ranks.
Then the collectives of `fsdp` or `hsdp`, with 1/T of the bytes.
"""

import contextlib
import dataclasses
import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.optim import Optimizer

# torch: this starts its random numbers for DTensors; without it, torch gives all ranks the state of the first one.
# torch: runs a module with other tensors as its parameters; `functional_call` would run the module's hooks as well.
from ..._compat.torch import _reparametrize_module, manual_seed, tree_map_only
from ...checkpoint import get_random_state, set_random_state
from ...compression import CommHook
from ...flags import Axis, Layout, check_count
from ...initialization import check_shapes
from ..callers import is_users
from ..collectives import NoSharedSamples
from ..contents import begin_count, in_tuples, num_writes
from ..fsdp.shard_checks import explained
from ..fsdp.strategy import FSDP
from ..operator_rules import install_operator_rules
from ..options import FSDPOptions, FSDPTPOptions, HSDPOptions, HSDPTPOptions, TPOptions
from ..step_guard import StepSnapshot
from ..whole_steps import plain_as_replicas
from .plan import make_plan
from .styles import (
    FusedColwise,
    MisfitError,
    ParallelRegion,
    cause_of,
    is_raised_by_dtensor,
    may_be_dtensors,
    refuse_second_backward,
    replicate,
    to_plain,
    to_replica,
)
from .view_writes import NoLostWrites

# torch: it warns of two all-gathers in a row, which the whole weights at the end of a run need.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

__all__ = ["TensorParallel"]


class TensorParallel(FSDP):
    """Layers split over the axis `tp` of the mesh, and `fully_shard` on the others, if there are any.

    Args:
        options: `TPOptions` for the axis `tp` alone, `FSDPTPOptions` and `HSDPTPOptions` for two and three axes.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: none; the registry says why.
    """

    options: Any
    split_axis: Axis = "tp"
    """The axis of the mesh whose ranks have the same samples."""
    _names: Mapping[type, str] = {TPOptions: "tp", FSDPTPOptions: "fsdp+tp", HSDPTPOptions: "hsdp+tp"}
    """The flag by the class of its options."""
    capabilities = dataclasses.replace(
        FSDP.capabilities,
        can_offload=frozenset({"parameters"}),
        unsupported_repeat="tensor parallelism",
        unsupported_counting="has its collectives made by DTensor",
    )

    def __init__(self, options: Any, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(options, launcher, comm_hook)
        if not isinstance(options, FSDPOptions):  # no axis shards the parameters
            self.capabilities = dataclasses.replace(self.capabilities, can_offload=frozenset())
        self._styles: dict[nn.Module, Any] = {}
        self._applied: dict[nn.Module, tuple[Any, set[int]]] = {}
        """The style of each split sub-module, and the keys of the hooks that it has registered."""
        self._has_run: set[str] = set()
        """Names of steps that have run with the plan, without an error."""
        self._while_running = contextlib.ExitStack()
        self._is_inner = False
        self._replicated: list[Any] = []
        self._collectives: NoSharedSamples

    def __repr__(self) -> str:
        name = self._names[type(self.options)]
        return repr(f"{name}_{self.launcher_suffix}" if self.launcher_suffix else name)

    @property
    def _shards(self) -> bool:
        return isinstance(self.options, FSDPOptions)

    @property
    def _splits_sequences(self) -> bool:
        """Whether activations between the regions are DTensors, too, that are split by time."""
        return bool(self.options.sequence_parallel)

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout: `split_axis` from the options, the other axes as `fsdp` and `hsdp` derive them."""
        options, axis = self.options, self.split_axis
        size = getattr(options, axis)
        if not self._shards:
            return Layout.derive(world_size, rest=axis, **{axis: size})
        if size is None:
            size = world_size // self.num_nodes if self.num_nodes > 1 else min(2, world_size)
        check_count(f"the size of axis {axis!r}", size)
        if not isinstance(options, HSDPOptions):
            return Layout.derive(world_size, rest="shard", **{axis: size})
        replicate = self.num_nodes if options.replicate is None and options.shard is None else options.replicate
        rest: Axis = "replicate" if replicate is None else "shard"
        return Layout.derive(world_size, rest=rest, replicate=replicate, shard=options.shard, **{axis: size})

    def check_module(self, module: nn.Module) -> None:
        """Raises ValueError if `module` can't be split, before any process starts."""
        super().check_module(module)
        if not is_overridden("configure_model", module):  # which may add layers
            check_shapes(module)
            self._make_plan(module)

    def _make_plan(self, module: nn.Module) -> Any:
        options = self.options
        return make_plan(
            module,
            self.layout.tp,
            is_sharded=self._shards,
            loss_parallel=options.loss_parallel,
            by_sequence=options.sequence_parallel,
        )

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """See `MeshStrategy`."""
        return (*super().mesh_axes, self.split_axis) if self._shards else (self.split_axis,)

    @property
    def _split_mesh(self) -> Any:
        return self.device_mesh[self.split_axis]

    def _shard_mesh(self) -> Any:
        return self.device_mesh[super().mesh_axes]

    def _is_laid_out(self, model: nn.Module) -> bool:
        return any(isinstance(p, DTensor) for p in model.parameters())

    def setup(self, trainer: Trainer) -> None:
        """Splits the module, unless an earlier `fit` has, and creates the optimizers of the split parameters."""
        install_operator_rules()
        self._collectives = NoSharedSamples(self.layout.num_sharing, self.split_axis)
        super().setup(trainer)
        self._equalise_random_state()
        assert self.model is not None
        self.hand_out_data_group(self.model)
        parameters = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        self._replicated = [] if self._shards else [p for p in parameters if p.placements == (Replicate(),)]
        if getattr(self.options, "loss_parallel", False):
            self._while_running.enter_context(loss_parallel())

    def teardown(self) -> None:
        """Restores torch's settings."""
        self._while_running.close()
        super().teardown()

    def _equalise_random_state(self) -> None:
        """Gives ranks with the same samples one random state, so that replicated activations stay equal."""
        if self.root_device.type == "cuda":
            torch.cuda.init()  # so that the random state below has that of the device
        # torch: a warning about plain tensors of shape [1] that meet a DTensor; they count as replicas, as wanted.
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1 and ndim!=0")
        state = [get_random_state()]
        if self.root_device.type == "cuda":
            # Without this, torch gives all ranks one state, those with other samples too.
            manual_seed(0, self.device_mesh)
        else:  # torch: on the CPU it draws for a DTensor as for any tensor, as wanted, and warns
            warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        group = self._split_mesh.get_group()
        dist.broadcast_object_list(state, group=group, group_src=0, device=self.root_device)
        set_random_state(state[0])

    def _shard(self, model: nn.Module) -> None:
        plan = self._make_plan(model)
        self._styles = {model.get_submodule(name): style for name, style in plan.styles.items()}
        rank_zero_info(str(plan))
        super()._shard(model)

    def _split(self, submodule: nn.Module) -> None:
        """Splits the layers of `submodule` that are in the plan; tied parameters stay tied."""
        before = [(sub, key, p) for sub in submodule.modules() for key, p in sub._parameters.items() if p is not None]
        styles = [(sub, self._styles.pop(sub)) for sub in submodule.modules() if sub in self._styles]
        for sub, style in reversed(styles):  # children first: a parent's style handles the parameters that remain
            hooks_before = _hooks_of(sub)
            # src_data_rank=None: every rank has the whole layer, so nothing is sent.
            parallelize_module(sub, self._split_mesh, style, src_data_rank=None)
            sub.register_forward_hook(refuse_second_backward)
            self._applied[sub] = style, _hooks_of(sub) - hooks_before
        if self._splits_sequences:
            # Each rank uses the unsplit parameters for a part of the sequence: their gradients must be summed.
            replicate(submodule, self._split_mesh)
        split: dict[Any, Any] = {}
        for sub, key, whole in before:
            new = sub._parameters[key]
            if new is not whole:
                sub._parameters[key] = split.setdefault(whole, new)
                _check_tie(split[whole], new, sub)
        for sub, key, whole in before:
            if sub._parameters[key] is whole and whole in split:
                raise ValueError(f"{_tie(sub)} one of them is split and the other one is not.")

    def _fully_shard(self, submodule: nn.Module, is_kept: bool) -> None:
        if self._shards:
            super()._fully_shard(submodule, is_kept)

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Shards a `_StridedShard` of rows by columns: DTensor has no placement for a second shard of its rows."""
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        has_blocks = any(hasattr(p, "split_factor") and getattr(p, "dim", None) == 0 for p in placements)
        return Shard(1) if has_blocks else None

    def _mark_in_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        marked = super()._mark_in_step(step)

        def plain(*args: Any, **kwargs: Any) -> Any:
            with (
                plain_as_replicas(),
                NoLostWrites() if self.compile is None else contextlib.nullcontext(),
                self._collectives,
                _explaining_dtensor(self._refusal),
                explained(self.model, repr(self)),
            ):
                result = self._run_or_replicate(marked, args, kwargs)
                _give_plain_gradients(result)
                return to_plain(result)

        return plain

    def _run_or_replicate(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `step`. In its first run, a region that fails with DTensors is replicated, and the step runs again."""
        module: Any = self.lightning_module
        name = step.__name__
        # With manual optimization a step that failed may have changed weights already.
        is_manual = name == "training_step" and not module.automatic_optimization
        if name in self._has_run or self._shards or self.compile is not None or is_manual:
            return step(*args, **kwargs)
        while True:
            snapshot = StepSnapshot(module, *([module.trainer._results] if module.trainer._results is not None else []))
            try:
                result = step(*args, **kwargs)
            except MisfitError as error:
                snapshot.undo()
                self._replicate_regions(type(error.region), error)
            else:
                self._has_run.add(name)
                return result

    def _replicate_regions(self, kind: type[nn.Module], error: MisfitError) -> None:
        """Makes every rank compute all of each region of this class."""
        # The ranks have the same samples, so all of them come here.
        for part, (style, _) in self._applied.items():
            if isinstance(style, ParallelRegion) and type(part) is kind:
                _compute_replicated(part, style, self._applied)
        rank_zero_info(
            f"Every tensor-parallel rank computes the whole of each {kind.__name__}, whose weights stay split and are"
            f" gathered for it: its forward does not go with the derived plan ({cause_of(error.__cause__)})."
        )

    @property
    def _refusal(self) -> str:
        """The end of the message of an operation that fails with DTensors."""
        hint = _SEQUENCE_HINT if self.options.sequence_parallel else ""
        return (
            "this can't be done with what is split over the tensor-parallel ranks: parameters, gradients, and what such"
            f" a layer has returned. {hint}Name other layers in tensor_parallel_plan(), or choose another strategy,"
            " such as 'fsdp'."
        )

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; as in forward, the user's own plain tensors count as replicas."""
        _give_plain_gradients(closure_loss)  # for steps with manual optimization
        with plain_as_replicas(), self._collectives, _explaining_dtensor(self._refusal):
            loss = super().backward(closure_loss, *args, **kwargs)
        if not self._is_inner or self.synchronises_always:
            self._reduce_replicated_gradients()
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the optimizer's step; with `fused` and `foreach` it combines plain parameters with DTensors."""
        with plain_as_replicas(), _explaining_dtensor(self._refusal, type(optimizer).__name__):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def _reduce_replicated_gradients(self) -> None:
        """Phase 3 of the module's docstring; with a second axis FSDP2 does it."""
        for p in self._replicated:
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    def _hook_units(self) -> None:
        """Does nothing: nothing is compressed, and DTensor's traffic can't be counted."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of a micro-batch that does not end its window: gradients are not reduced."""
        self._is_inner = True
        try:
            with super().block_backward_sync() if self._shards else contextlib.nullcontext():
                yield
        finally:
            self._is_inner = False


_SEQUENCE_HINT = """\
With sequence_parallel=true that is so of all activations, those of layers that are not split, too: leave it out. """


@contextlib.contextmanager
def _explaining_dtensor(refusal: str, optimizer: str = "") -> Generator[None, None, None]:
    """Context in which an operation that fails with DTensors is an error with the line of the user's code.

    Args:
        refusal: what can't be done, and what to do, for the message.
        optimizer: the name of the optimizer's class, around its step; else "".

    Raises:
        RuntimeError: an operation fails.
    """
    try:
        yield
    except Exception as error:
        if (line := _where_dtensor_failed(error)) is None:
            raise
        if optimizer and _is_in_optimizer(error):
            raise RuntimeError(
                f"the step of {optimizer} can't be done with parameters that are split over the tensor-parallel"
                f" ranks: {line}. Take an optimizer that computes element by element and with norms, such as"
                " AdamW, Adafactor, LARS or LAMB, or choose another strategy, such as 'ddp'."
            ) from error
        raise RuntimeError(f"{line}: {refusal}") from error


def _is_in_optimizer(error: Exception) -> bool:
    """Whether an optimizer's own code failed, rather than its closure, which runs the step and its hooks."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [owner for owner in owners if isinstance(owner, (Optimizer, nn.Module, Callback, Closure))]
    return bool(owners) and isinstance(owners[-1], Optimizer)


def _where_dtensor_failed(error: Exception) -> str | None:
    """Returns the line of the user's code whose DTensor operation raised `error`; None if DTensor did not raise it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    places = traceback.StackSummary.extract(iter(frames))
    of_user = [(frame, frame_line) for (frame, _), frame_line in zip(frames, places, strict=True) if is_users(frame)]
    # An operation on the local tensors, such as a view of non-contiguous ones, fails without a frame of DTensor's.
    has_dtensors = any(isinstance(value, DTensor) for frame, _ in of_user[-1:] for value in frame.f_locals.values())
    may_be_local = type(error) is RuntimeError and error.__cause__ is None and has_dtensors and may_be_dtensors(error)
    if not (is_raised_by_dtensor(error) or may_be_local) or isinstance(error, torch.OutOfMemoryError):
        return None
    modules = [frame.f_locals.get("self") for frame, _ in of_user]
    inside = [f"the forward of {type(module).__name__}, " for module in modules if isinstance(module, nn.Module)]
    text = "".join([*inside[-1:], *(f'{p.filename}:{p.lineno} in {p.name}: "{p.line}", ' for _, p in of_user[-1:])])
    message = (
        f"{type(error).__name__}: {cause_of(error)}" if str(error) else f"{type(error).__name__} without a message"
    )
    inner = places[-1]
    return f'{text}where torch\'s DTensor raised {message} (in {inner.name}: "{inner.line}")'


def _check_tie(first: Any, second: Any, sub: nn.Module) -> None:
    if first.placements != second.placements:
        raise ValueError(f"{_tie(sub)} one is split as {first.placements}, the other one as {second.placements}.")


def _tie(sub: nn.Module) -> str:
    return (
        f"tensor_parallel_plan() must split layers that share a parameter, such as this {type(sub).__name__}, in the"
        " same way (the rows of an embedding, RowwiseParallel, are those of an output layer, ColwiseParallel), but"
    )


# Handles losses that add plain tensors to split parameters, such as a penalty over `self.parameters()`.
#
# Outside of regions activations are plain tensors and split parameters are DTensors. Their sum is a DTensor, and
# autograd gives both a DTensor as gradient; the plain part of the graph needs a plain tensor.

# autograd: the nodes that turn a DTensor into a plain tensor (`_Leave` of styles.py, torch's to_local) or back (torch's
# from_local). They convert the gradients, too, so the graph below them needs nothing.
_IS_SPLIT = {"_LeaveBackward": False, "_ToTorchTensorBackward": False, "_FromTorchTensorBackward": True}


def _give_plain_gradients(loss: Any) -> None:
    """Hooks the graph of `loss` so that its plain tensors get plain gradients; does nothing if `loss` is plain.

    Args:
        loss: the output of a step: a tensor, or a nested value with tensors.
    """
    tree_map_only(DTensor, _hook_plain_inputs, loss)


def _hook_plain_inputs(loss: DTensor) -> None:
    if loss.grad_fn is None:
        return
    is_split: dict[Node, bool] = {}
    """Whether the output of a node is a DTensor: one of its inputs was."""
    hooked: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(loss.grad_fn, False)]
    while stack:
        node, inputs_are_known = stack.pop()
        if node in is_split:
            continue
        if type(node).__name__ in _IS_SPLIT:
            is_split[node] = _IS_SPLIT[type(node).__name__]
            continue
        inputs = [source for source, _ in node.next_functions if source is not None]
        if not inputs_are_known:
            stack += [(node, True), *((source, False) for source in inputs)]
            continue
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        is_split[node] = isinstance(leaf, DTensor) or any(is_split[source] for source in inputs)
        for source in inputs if is_split[node] else ():
            if not is_split[source] and source not in hooked:
                hooked.add(source)
                source.register_prehook(_plain)


def _plain(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)


# Runs a region whose forward fails with DTensors: its weights stay split, and every rank computes all of it.
#
# Communication: an all-gather of the weights in forward, and another one where the forward is recomputed in backward.
# The ranks have the same inputs and compute the same, so each has the whole gradient and keeps its own part: nothing
# is sent.


def _hooks_of(module: nn.Module) -> set[int]:
    """Returns the keys of the forward hooks of `module` itself."""
    return {*module._forward_pre_hooks, *module._forward_hooks}  # torch: Module._forward_hooks


def _compute_replicated(
    region: nn.Module, style: ParallelRegion, applied: Mapping[nn.Module, tuple[Any, Collection[int]]]
) -> None:
    """Makes every rank compute all of `region`: removes the hooks of its styles and gathers its weights in forward.

    Args:
        region: a sub-module of the model.
        style: the style that it was split by.
        applied: for each split sub-module its style, and the keys of the hooks that the style has registered.
    """
    for submodule in region.modules():
        if submodule is region or submodule not in applied:
            continue
        style_of_part, keys = applied[submodule]
        for key in keys:
            submodule._forward_pre_hooks.pop(key, None)
            submodule._forward_hooks.pop(key, None)
        if isinstance(style_of_part, FusedColwise):
            del submodule.forward
    style.replacement = _forward


def _forward(region: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    parameters = dict(region.named_parameters())
    mesh = next(p.device_mesh for p in parameters.values() if isinstance(p, DTensor))
    wholes = to_plain(parameters)
    versions = {name: begin_count(whole) for name, whole in wholes.items()}
    with _reparametrize_module(region, wholes):
        result = forward(*in_tuples(to_plain, args), **{name: in_tuples(to_plain, arg) for name, arg in kwargs.items()})
    with torch.no_grad():  # all ranks have written the same
        for name, version in versions.items():
            if num_writes(wholes[name]) != version:
                parameter: Any = parameters[name]
                parameter.copy_(
                    distribute_tensor(wholes[name].detach(), mesh, parameter.placements, src_data_rank=None)
                )
    return tree_map_only(Tensor, lambda tensor: to_replica(tensor, mesh), result)
