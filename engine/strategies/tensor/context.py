"""`cp`, `ddp+cp`, `fsdp+cp` and `hsdp+cp`: the sequences of a batch split over ranks that have the same samples.

Before the first of the repeated blocks every rank has whole activations; from there on they are DTensors [batch, time,
...] of the whole shape, of which each rank has a part of the time, until the loss. What a module derives from a length
(positions, masks, shifts) is that of the whole sequence. Parameters are whole on each rank, or sharded by FSDP2 over
the ranks with other samples; the axis `cp` of the mesh is innermost, where links are fastest.

Communication per micro-batch over the ranks of `cp`, with activations of A bytes:
1. attention, forward: an all-to-all each of queries, keys and values, from parts of the time to some of the heads, and
   one of the result, back: each A / ranks. Backward: the same in the other direction. `attention=ring`: see `ring.py`;
2. the gradient of the first block's input: an all-gather of A;
3. per optimizer step: an all-reduce of the gradient of each parameter.
Then the collectives of `fsdp` or `hsdp`.
"""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..._compat.torch import tree_leaves, tree_map_only
from ...flags import Axis
from ..options import CPOptions, DDPCPOptions, FSDPCPOptions, HSDPCPOptions
from ..units import named_blocks
from .strategy import TensorParallel
from .styles import Moved, as_dtensor, is_raised_by_dtensor, replicate, to_plain, to_replica, wrap_forward

__all__ = ["ContextParallel", "SequenceFunctions", "cut", "weighing_absolute_errors"]


class ContextParallel(TensorParallel):
    """Sequences split over the axis `cp` of the mesh, and `fully_shard` on the others, if there are any.

    Args:
        options: `CPOptions` for the axis `cp` alone, `FSDPCPOptions` for two, `HSDPCPOptions` or `DDPCPOptions` for
            three axes.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: none; the registry says why.
    """

    capabilities = dataclasses.replace(TensorParallel.capabilities, unsupported_repeat="context parallelism")
    split_axis: Axis = "cp"
    _names = MappingProxyType(
        {CPOptions: "cp", DDPCPOptions: "ddp+cp", FSDPCPOptions: "fsdp+cp", HSDPCPOptions: "hsdp+cp"}
    )

    def __init__(self, options: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(options, *args, **kwargs)
        self._attend: Callable[..., Any] = _attention
        if options.attention == "ring":
            # Imported here, since it takes long; not later, when the process has a group.
            from .ring import ring_attention

            self._attend = ring_attention

    @property
    def _refusal(self) -> str:
        return (
            "this can't be done with a sequence that is split over ranks: in torch's DTensor, which says of each"
            " function how parts of its arguments make parts of its result, this one has no rule. Choose another"
            " strategy, such as 'fsdp', or have the module compute it without torch's own kernel for it."
        )

    @property
    def _splits_sequences(self) -> bool:
        return True

    def _make_plan(self, module: nn.Module) -> "_Plan":
        blocks = set(named_blocks(module))
        if not blocks:
            raise ValueError(
                f"no blocks of {type(module).__name__} are known, at which its sequences could be split: there is no"
                " ModuleList or Sequential of several blocks of one class. Give the module a method shard_units() that"
                " returns them, or choose another strategy, such as 'fsdp'."
            )
        names = [name for name, submodule in module.named_modules() if submodule in blocks]
        self._entry = _SplitSequence(self._attend)
        return _Plan(self.layout.cp, dict.fromkeys(names, self._entry))

    def _run_or_replicate(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `step`. After the first of training, says so if there was no sequence to split."""
        with SequenceFunctions(self._attend):
            result = step(*args, **kwargs)
        if step.__name__ == "training_step" and step.__name__ not in self._has_run:
            self._has_run.add(step.__name__)
            if not self._entry.has_split:
                rank_zero_info(
                    f"No block of {type(self.lightning_module).__name__} was called with a tensor [batch, time, ...],"
                    " whose sequence could be split: every rank of cp computes all of a step. Choose another strategy,"
                    " such as 'fsdp'."
                )
        return result

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """See `DistributedStrategy`."""
        super().check_run(compiles=compiles, callbacks=callbacks)
        if compiles:
            raise ValueError(
                f"strategy {self!r} can't be compiled: the functions of a split sequence are chosen while they run."
                " Leave out compile=True, or choose another strategy, such as 'fsdp' with activation_checkpointing."
            )

    def setup(self, trainer: Trainer) -> None:
        """Splits the sequences from here on; see `TensorParallel`."""
        self._while_running.enter_context(_recomputed_alike(self._attend))
        self._while_running.enter_context(_refusing_flex_attention())
        self._while_running.enter_context(weighing_absolute_errors())
        super().setup(trainer)


@dataclasses.dataclass(frozen=True)
class _Plan:
    num_ranks: int
    styles: dict[str, ParallelStyle]

    def __str__(self) -> str:
        names = list(self.styles)
        return f"Sequences split over {self.num_ranks} ranks, from {names[0]} to {names[-1]} and after it."


class _SplitSequence(ParallelStyle):
    """Blocks whose first input [batch, time, width] is split along time, if it is not already.

    Attributes:
        has_split: whether one of them was called with such an input.
    """

    has_split = False

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._attend = attend

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh)
        self._mesh = device_mesh
        wrap_forward(module, self._run)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        place = next((place for place, arg in named.items() if _has_time(arg)), None)
        if place is not None:
            self.has_split = True
            named[place] = cut(named[place], self._mesh)
        # Entered here, too: where a block is computed again, in backward, no mode is active.
        with SequenceFunctions(self._attend):
            return forward(*(named[i] for i in range(len(args))), **{name: named[name] for name in kwargs})


def _has_time(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.ndim == 3 and arg.shape[1] > 1


# Functions of torch on tensors whose sequences are split over ranks: with the result that one process has.
#
# A split sequence is a DTensor of the whole shape, sharded along time, so code that reads a length or makes positions,
# masks or shifts from it sees the whole. torch's rules for DTensors do most functions so. Here are those that they do
# in another way: with more communication, with means of parts, with writes that are lost, or not at all. What has no
# rule is computed by each rank on whole tensors: right, but the rank then has all of the time.

_MEANS = {
    function
    for function in vars(functional).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
} | {functional.binary_cross_entropy_with_logits}
"""Losses: of unequal parts torch would average the means, and of some it has a wrong gradient even of equal ones."""
_ON_WHOLE = {
    *(getattr(torch, f"{kind}{n}d") for kind in ("conv", "conv_transpose") for n in (1, 2, 3)),
    *(function for name, function in vars(functional).items() if "_pool" in name and callable(function)),
    *(functional.group_norm, functional.instance_norm, functional.fold, functional.unfold, functional.grid_sample),
    *(functional.ctc_loss, torch.Tensor.unfold, torch.group_norm),
    *(functional.logsigmoid, functional.multilabel_soft_margin_loss),
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
}
"""Functions for whose backward torch has no rule, or one that is wrong."""
_BY_CLASS = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the samples that are not ignored, by their weights."""
_BY_WEIGHT = (functional.l1_loss, functional.mse_loss)
"""Losses whose mean with a `weight` is divided by its sum; torch divides others by the number of values."""
_BODIES = (functional.multi_head_attention_forward, functional.linear_cross_entropy)
"""Functions whose own code is run in the mode, which sees what they call: attention and dropout, `cross_entropy`."""


def cut(tensor: Tensor, mesh: Any) -> Any:
    """Returns a tensor [batch, time, ...] split along time; of one that each rank has whole, nothing is sent."""
    return as_dtensor(tensor, mesh).redistribute(placements=[Shard(1)])


@contextlib.contextmanager
def _recomputed_alike(attend: Callable[..., Any]) -> Iterator[None]:
    """Context in which what `torch.utils.checkpoint` computes again in backward, where no mode is active, sees one."""
    make = checkpoint._checkpoint_without_reentrant_generator  # torch: `checkpoint` looks it up at each call

    def make_alike(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*inputs: Any, **named: Any) -> Any:
            with SequenceFunctions(attend):
                return function(*inputs, **named)

        return make(run, *args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = make_alike  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = make


@contextlib.contextmanager
def _refusing_flex_attention() -> Iterator[None]:
    """Context in which FlexAttention of a split sequence is an error by name: torch has no rule for it."""
    check = flex_attention._validate_embed_dim  # torch: `flex_attention` itself is imported by name

    def refuse(query: Tensor, key: Tensor, value: Tensor) -> None:
        if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            raise NotImplementedError(
                "flex_attention can't be computed of a sequence that is split over ranks. Use"
                " scaled_dot_product_attention, with `is_causal` or a mask (attn_implementation='sdpa' in"
                " transformers), or choose another strategy, such as 'fsdp'."
            )
        check(query, key, value)

    flex_attention._validate_embed_dim = refuse
    try:
        yield
    finally:
        flex_attention._validate_embed_dim = check


@contextlib.contextmanager
def weighing_absolute_errors() -> Iterator[None]:
    """Context in which a mode sees the `weight` of `l1_loss`, which torch 2.13 does not hand on."""
    module: Any = functional
    hand_on = module.handle_torch_function

    def with_weight(function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if function is functional.l1_loss:
            kwargs["weight"] = tensors[2]
        return hand_on(function, tensors, *args, **kwargs)

    module.handle_torch_function = with_weight
    try:
        yield
    finally:
        module.handle_torch_function = hand_on


class SequenceFunctions(TorchFunctionMode):
    """Context in which functions of torch on split sequences have the results of whole ones.

    Args:
        attend: computes `scaled_dot_product_attention`, of the same arguments; None: heads are exchanged for time.
    """

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._attend = attend or _attention

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of each function of torch's API."""
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        if function is functional.scaled_dot_product_attention and _is_split_by_time(args, kwargs):
            return self._attend(*args, **kwargs)
        if function in _ON_WHOLE:
            return _on_whole(function, args, kwargs)
        if function in _BODIES:
            with self:
                return _body(function)(*args, **kwargs)
        if _writes(function):
            return _write(function, args, kwargs)
        try:
            return _loss(function, *args, **kwargs) if function in _MEANS else function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not is_raised_by_dtensor(error):
                raise
            return _on_whole(function, args, kwargs)  # by rules: all ranks come here


def _body(function: Any) -> Callable[..., Any]:
    """Returns the code of a function of `torch.nn.functional`, without its own question whether there is a mode."""
    asks = ("has_torch_function", "has_torch_function_variadic")
    names = vars(functional) | dict.fromkeys(asks, lambda *tensors: False)
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _on_whole(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    result = function(*to_plain(args), **to_plain(kwargs))
    return tree_map_only(Tensor, lambda tensor: to_replica(tensor, tensors[0].device_mesh), result)


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _write(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a function that writes to its first argument."""
    if not args or not isinstance(args[0], DTensor):  # a buffer of the module, or a metric's state
        return function(*args[:1], *to_plain(args[1:]), **to_plain(kwargs))
    target = args[0]
    if _is_copy(target):
        raise RuntimeError(
            f"{function.__name__} writes to a part of a sequence that is split over ranks: it would write to a copy."
            " Have it return a new tensor (torch.where, torch.cat), or choose another strategy, such as 'fsdp'."
        )
    if function is not Tensor.__setitem__ or all(placement.is_replicate() for placement in target.placements):
        return function(*args, **kwargs)
    whole = to_plain(target).clone()
    function(whole, *to_plain(args[1:]))
    replica: Any = to_replica(whole, target.device_mesh)
    target.copy_(replica.redistribute(placements=target.placements))
    return None


def _is_copy(tensor: DTensor) -> bool:
    """Whether it is a view for torch, but of a tensor that had to be gathered for it."""
    base: Any = tensor._base
    if base is None:
        return False
    parts = [part.to_local().untyped_storage() for part in (tensor, base)]
    return parts[0].data_ptr() != parts[1].data_ptr()


def _is_split_by_time(args: Any, kwargs: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((args[:3], kwargs)) if isinstance(leaf, DTensor)]
    return any(placement == Shard(tensor.ndim - 2) for tensor in tensors for placement in tensor.placements)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of whole sequences, of some heads on each rank (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

    Takes and returns [batch, heads, time, dim], split along time. Heads that the ranks can't share equally: each rank
    has some samples; else every rank has all of them.
    """
    if dropout_p:
        raise ValueError(
            "attention with dropout can't be split along the sequence: set its dropout to 0 (that of other layers may"
            " stay), or choose another strategy, such as 'fsdp'."
        )
    tensors = [query, key, value]
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    num_ranks, num_heads = mesh.size(), query.shape[1]
    if enable_gqa and num_heads % num_ranks == 0 and key.shape[1] % num_ranks:
        times = num_heads // key.shape[1]
        tensors[1:] = [tensor.repeat_interleave(times, dim=1) for tensor in (key, value)]
        enable_gqa = False
    over: Any = Replicate()
    if all(tensor.ndim == 4 and tensor.shape[1] % num_ranks == 0 for tensor in tensors):
        over = Shard(1)
    elif all(tensor.shape[0] % num_ranks == 0 for tensor in tensors):
        over = Shard(0)
    tensors = [Moved.apply(as_dtensor(tensor, mesh), over) for tensor in tensors]
    query, key, value = tensors
    result = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return Moved.apply(result, Shard(query.ndim - 2))


def _loss(function: Any, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    reduction = bound.arguments.get("reduction", "mean")
    size_average, reduce = (bound.arguments.pop(name, None) for name in ("size_average", "reduce"))
    if size_average is not None or reduce is not None:  # torch's old words for it
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "sum", "mean") and (function, reduction) != (functional.kl_div, "batchmean"):
        return function(*args, **kwargs)  # torch's error
    if function in _BY_CLASS:
        return _class_loss(function, bound.arguments, reduction)
    result = function(**(bound.arguments | {"reduction": "none"}))
    if reduction == "none":
        return result
    total = result.sum()
    if reduction == "sum":
        return total
    weight = bound.arguments.get("weight") if function in _BY_WEIGHT else None
    if weight is not None:
        return total / weight.sum()
    return total / (len(result) if reduction == "batchmean" else max(1, result.numel()))


def _class_loss(function: Any, named: dict[str, Any], reduction: str) -> Any:
    scores, target = named["input"], named["target"]
    shape = target.shape
    is_index = not target.is_floating_point()
    if scores.ndim > 2:  # [batch, classes, time, ...]
        scores = scores.movedim(1, -1).flatten(0, -2)
        target = target.flatten() if is_index else target.movedim(1, -1).flatten(0, -2)
    if reduction == "none":
        losses = function(**(named | {"input": scores, "target": target, "reduction": "none"}))
        return losses.view(shape) if is_index else losses
    total = function(**(named | {"input": scores, "target": target, "reduction": "sum"}))
    if reduction == "sum":
        return total
    if not is_index:
        return total / max(1, scores[..., 0].numel())
    is_kept = target != named.get("ignore_index", -100)
    weight = named.get("weight")
    if weight is None:
        return total / is_kept.sum()
    return total / (weight[torch.where(is_kept, target, 0)] * is_kept).sum()
