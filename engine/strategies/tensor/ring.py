"""Ring attention (Liu et al. 2023, arXiv:2310.01889): queries stay, keys and values go round the ranks.

By torch's own templates, those of `torch.distributed.tensor.experimental.context_parallel`, without its dispatcher:
that takes the first dim of a mesh for all attention of the process. Other than theirs, keys and values go round with
the heads that they have, of which each may be that of several queries.

Communication of one attention over W ranks, which have queries of Q bytes and keys and values of K bytes each:
1. causal: an all-to-all each of queries, keys and values, after which each rank has an early and a late part of the
   sequence, so that all have as much to compute; and one of the result back. Blocks;
2. forward: keys and values to the next rank, W - 1 times 2 K, beside the attention to those that are there;
3. backward: the same, and W times their gradients, which nothing overlaps; then 1 in the other direction.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

# torch: the templates, their options, which are the process's, and how keys and values are sent.
from ..._compat.torch import _attention as torchs
from .styles import Moved, as_dtensor

__all__ = ["ring_attention"]

_TIME = 2
_aten = torch.ops.aten
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cpu": (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
    "cuda": (_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward),
}
"""Attention that returns the logarithm of its sums, too, and its backward, by device."""
_FOR_BACKWARD = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""The other results of the operator of GPUs, which its backward takes."""


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` of [batch, heads, time, dim], split along time as its result is.

    Raises:
        ValueError: it can't be computed so; the message says why.
    """
    mesh = next(tensor.device_mesh for tensor in (query, key, value) if isinstance(tensor, DTensor))
    if reason := _reason_against(query, key, value, attn_mask, dropout_p, is_causal, mesh.size()):
        raise ValueError(
            f"attention=ring can't be used here: {reason}. Change that, or leave attention=ring out of the strategy."
        )
    parts = [Moved.apply(as_dtensor(tensor, mesh), Shard(_TIME)).to_local() for tensor in (query, key, value)]
    result = _Ring.apply(*parts, mesh.get_group(), is_causal, scale)
    return DTensor.from_local(result, mesh, [Shard(_TIME)], run_check=False)


def _reason_against(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, num_ranks: int
) -> str:
    if mask is not None:
        return "the attention has a mask, which torch's ring does not take: it does `is_causal`, and all to all"
    if dropout_p:
        return "the attention has dropout"
    if any(tensor.ndim != 4 for tensor in (query, key, value)):
        return "queries, keys and values must be [batch, heads, time, dim]"
    lengths, num_parts = {query.shape[_TIME], key.shape[_TIME]}, num_ranks * (2 if is_causal else 1)
    if is_causal and len(lengths) > 1:
        return f"causal attention of {query.shape[_TIME]} queries to {key.shape[_TIME]} keys"
    if any(length % num_parts for length in lengths):
        return f"{num_ranks} ranks need {num_parts} equal parts of a sequence, but its length is {max(lengths)}"
    if query.device.type == "cuda" and query.dtype.itemsize > 2:
        return "on GPUs it needs 16 bits, as with precision='bf16-mixed'"
    return "" if query.device.type in _OPERATORS else f"it does not run on {query.device.type}"


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, is_causal: bool, scale: float | None
    ) -> Tensor:
        forward, ctx.operator = _OPERATORS[query.device.type]
        query, key, value = (_dealt(tensor, group, is_causal) for tensor in (query, key, value))
        run = partial(_with_all_heads, forward)
        with _options(is_causal, query.dtype):
            result, sums, *rest = torchs._templated_ring_attention(
                group, _TIME, run, query, key, value, is_causal=is_causal, dropout_p=0.0, scale=scale
            )
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.group, ctx.is_causal = group, is_causal
        ctx.others = {"dropout_p": 0.0, "scale": scale, **dict(zip(_FOR_BACKWARD, rest, strict=False))}
        return _dealt(result, group, is_causal, back=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, result, sums = ctx.saved_tensors
        gradient = _dealt(gradient, ctx.group, ctx.is_causal)
        backward = partial(_backward_with_all_heads, ctx.operator)
        with _options(ctx.is_causal, query.dtype):
            gradients = torchs._templated_ring_attention_backward(
                *(ctx.group, _TIME, backward, gradient, "grad_out", query, key, value, result, sums, ctx.is_causal),
                **ctx.others,
            )
        return *(_dealt(part, ctx.group, ctx.is_causal, back=True) for part in gradients[:3]), None, None, None


@contextlib.contextmanager
def _options(is_causal: bool, dtype: torch.dtype) -> Iterator[None]:
    """Context of a template: its options are those of the process."""
    options = torchs._cp_options
    before = dict(vars(options))
    options.enable_load_balance = is_causal
    options.convert_to_f32 = dtype != torch.float64
    options.rotate_method = torchs._RotateMethod.ALL_TO_ALL  # the other one has all keys and values at once
    try:
        yield
    finally:
        vars(options).update(before)


def _with_all_heads(operator: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    times = query.shape[1] // key.shape[1]
    return operator(query, *(part.repeat_interleave(times, 1) for part in (key, value)), **options)


def _backward_with_all_heads(
    operator: Callable[..., Any], *, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(times, 1) for part in (key, value))
    of_query, *of_others = operator(query=query, key=key, value=value, **options)
    return of_query, *(part.unflatten(1, (-1, times)).sum(2) for part in of_others)


def _dealt(tensor: Tensor, group: Any, is_causal: bool, *, back: bool = False) -> Tensor:
    """Sends the halves of each rank's time to where causal attention has as much to do on each rank, or back.

    Of W ranks, rank r has the parts r and 2 W - 1 - r of 2 W, as torch's template expects.
    """
    if not is_causal:
        return tensor.contiguous()
    rank, size = group.rank(), group.size()
    in_order = [part // 2 for part in range(2 * size)]
    balanced = [min(part, 2 * size - 1 - part) for part in range(2 * size)]
    before, after = (balanced, in_order) if back else (in_order, balanced)
    own, new = ([part for part in range(2 * size) if holder[part] == rank] for holder in (before, after))
    halves = dict(zip(own, tensor.chunk(2, _TIME), strict=True))
    sent, received = sorted(own, key=after.__getitem__), sorted(new, key=before.__getitem__)
    flat = torch.cat([halves[part].reshape(-1) for part in sent])
    room, length = torch.empty_like(flat), flat.numel() // 2
    to_come, to_send = (
        [length * sum(holder[part] == other for part in parts) for other in range(size)]
        for holder, parts in ((before, new), (after, own))
    )
    dist.all_to_all_single(room, flat, to_come, to_send, group)
    arrived = dict(zip(received, room.split(length), strict=True))
    return torch.cat([arrived[part].view(halves[own[0]].shape) for part in new], _TIME)
