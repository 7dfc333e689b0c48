"""Functions of torch on tensors whose sequences are split over ranks: with the result that one process has.

A split sequence is a DTensor of the whole shape, sharded along time, so code that reads a length or makes positions,
masks or shifts from it sees the whole. torch's rules for DTensors do most functions so. Here are those that they do
in another way: with more communication, on parts with means of their own, or not at all.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..._compat.torch import tree_leaves, tree_map_only
from .styles import is_raised_by_dtensor, to_plain

__all__ = ["SequenceFunctions", "cut"]

_MEANS = {
    function
    for function in vars(functional).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
} | {functional.binary_cross_entropy_with_logits}
"""Losses: of unequal parts torch would average the means, and of some it has a wrong gradient even of equal ones."""
_BY_CLASS = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the samples that are not ignored, by their weights."""


def cut(tensor: Any) -> Any:
    """Returns a DTensor [batch, time, ...] that is split along time: nothing is sent."""
    return tensor.redistribute(placements=[Shard(1)])


class SequenceFunctions(TorchFunctionMode):
    """Context in which functions of torch on split sequences have the results of whole ones."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of each function of torch's API."""
        kwargs = kwargs or {}
        if not _is_split(args, kwargs):
            return function(*args, **kwargs)
        if function is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if function is functional.dropout:
            return _dropout(*args, **kwargs)
        if function in _MEANS:
            return _loss(function, *args, **kwargs)
        is_in_place = _writes(function)
        if is_in_place and args and not isinstance(args[0], DTensor):  # a buffer of the module, or a metric's state
            return function(args[0], *to_plain(args[1:]), **to_plain(kwargs))
        try:
            return function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            # By its rules: all ranks come here.
            if is_in_place or not is_raised_by_dtensor(error):
                raise
            return function(*_gathered(args), **_gathered(kwargs))


def _is_split(*values: Any) -> bool:
    return any(
        isinstance(leaf, DTensor) and any(not placement.is_replicate() for placement in leaf.placements)
        for leaf in tree_leaves(values)
    )


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _gathered(value: Any) -> Any:
    return tree_map_only(DTensor, lambda tensor: tensor.redistribute(placements=[Replicate()]), value)


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
    tensors = [_as_dtensor(tensor, mesh).redistribute(placements=[over]) for tensor in tensors]
    result: Any = functional.scaled_dot_product_attention(
        *tensors, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    # The kernel's result is laid out as [batch, time, heads, dim], which what follows would take for granted.
    return result.contiguous().redistribute(placements=[Shard(query.ndim - 2)])


def _as_dtensor(tensor: Tensor, mesh: Any) -> Any:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout by the random numbers that one process draws for the whole tensor: the same on each rank."""
    if not training or p == 0 or input.device.type != "cpu":  # torch: on other devices DTensors draw so themselves
        return functional.dropout(input, p, training, inplace)
    factors = functional.dropout(torch.ones(input.shape, dtype=input.dtype), p)
    return input.mul_(factors) if inplace else input * factors


def _loss(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    reduction = bound.arguments.get("reduction", "mean")
    if "size_average" in bound.arguments or "reduce" in bound.arguments:  # torch's old words for it
        reduction = functional._Reduction.legacy_get_string(
            bound.arguments.pop("size_average", None), bound.arguments.pop("reduce", None), emit_warning=False
        )
    if function in _BY_CLASS:
        return _class_loss(function, bound.arguments, reduction)
    result = function(**(bound.arguments | {"reduction": "none"}))
    if reduction == "batchmean":
        return result.sum() / len(result)
    return {"mean": torch.mean, "sum": torch.sum, "none": lambda values: values}[reduction](result)


def _class_loss(function: Callable[..., Any], given: dict[str, Any], reduction: str) -> Any:
    scores, target = given["input"], given["target"]
    shape = target.shape
    is_index = not target.is_floating_point()
    if scores.ndim > 2:  # [batch, classes, time, ...]
        scores = scores.movedim(1, -1).flatten(0, -2)
        target = target.flatten() if is_index else target.movedim(1, -1).flatten(0, -2)
    if reduction == "none":
        losses = function(**(given | {"input": scores, "target": target, "reduction": "none"}))
        return losses.view(shape) if is_index else losses
    total = function(**(given | {"input": scores, "target": target, "reduction": "sum"}))
    if reduction == "sum":
        return total
    if not is_index:
        return total / max(1, scores[..., 0].numel())
    is_kept = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        return total / is_kept.sum()
    return total / (weight[torch.where(is_kept, target, 0)] * is_kept).sum()
