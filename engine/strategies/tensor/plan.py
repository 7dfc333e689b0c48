"""Which layers of a module are split over tensor-parallel ranks, and how: read off the module's structure.

Follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the first matrix of an MLP and the projections
to q, k and v are cut by columns, so that each rank has some hidden units or heads of its own; the second matrix, and
the projection out of the attention, by rows; embedding and output layer by the vocabulary. One all-reduce forward and
one backward for each MLP and each attention. What is found nowhere here stays whole on every rank.

No process group is needed for any of this.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...flags import did_you_mean
from .experts import Experts, find_experts
from .styles import FusedColwise, Region, Rows, Vocabulary
from .tables import Table
from .ties import torn_layers

__all__ = ["Entry", "Plan", "make_plan"]

_QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj")
_KEY = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj")
_VALUE = ("v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj")
_FUSED = ("qkv", "qkv_proj", "c_attn", "wqkv", "to_qkv", "in_proj", "query_key_value")
_OUT = ("o_proj", "out_proj", "out", "o", "wo", "to_out", "out_lin", "c_proj", "proj", "dense")
_DOWN = ("down_proj", "down", "w2", "fc2", "c_proj", "wo", "out")
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Dropout, nn.Identity),
)
_IN_MLPS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
"""Layers with parameters that may stand in an MLP."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One block of the plan."""

    name: str
    what: str
    """In words."""
    styles: Mapping[str, ParallelStyle]
    """Maps the name of each sub-module to its style."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of what is split over `num_ranks` ranks; prints as a table."""

    num_ranks: int
    entries: tuple[Entry, ...]
    left: tuple[tuple[str, str], ...] = ()
    """Names of what might have been split, and why it is not."""
    by_sequence: bool = False
    """Whether activations between the blocks are split by time."""
    whole_share: float = 0.0
    """Share of the parameters that every rank has all of."""

    @property
    def styles(self) -> dict[str, ParallelStyle]:
        """Maps the name of each sub-module to its style, parents before their children."""
        return {name: style for entry in self.entries for name, style in entry.styles.items()}

    def __str__(self) -> str:
        rows = [(entry.name, entry.what) for entry in self.entries]
        rows += [(name, f"whole: {why}") for name, why in self.left]
        rows = _alike(rows)
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"  {name:{width}}  {what}" for name, what in rows]
        title = f"Split over {self.num_ranks} tensor-parallel ranks ({self.whole_share:.1%} of the parameters are not):"
        if self.by_sequence:
            lines.append("  between them, activations are split by the sequence")
        return "\n".join([title, *lines])


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The requirements of a derived plan: number of ranks, and which values are sharded or stay split."""

    num_ranks: int
    is_sharded: bool
    loss_parallel: bool
    by_sequence: bool

    @property
    def last(self) -> ParallelStyle:
        """The style of the layer that ends a region, whose output is a sum over the ranks."""
        return RowwiseParallel(output_layouts=Shard(1) if self.by_sequence else None, use_local_output=False)

    @property
    def table(self) -> ParallelStyle:
        """The style of an embedding."""
        return Table(self.by_sequence)


_Left = list[tuple[str, str]]


def make_plan(
    module: nn.Module,
    num_ranks: int,
    *,
    is_sharded: bool = False,
    loss_parallel: bool = False,
    by_sequence: bool = False,
) -> Plan:
    """The plan that the module gives by ``tensor_parallel_plan()``, or the one that is derived from its structure.

    Args:
        module: the whole one.
        num_ranks: that share it.
        is_sharded: FSDP2 shards the parts.
        loss_parallel: leave the logits of a training step cut by the vocabulary.
        by_sequence: between the regions, cut activations [batch, time, ...] by time: norms, dropout, residuals.

    Raises:
        ValueError: heads that `num_ranks` does not divide, names that the module does not have, or no plan at all.
    """
    given = getattr(module, "tensor_parallel_plan", None)
    if callable(given) and by_sequence:
        raise ValueError(
            f"sequence_parallel=true is for plans that are derived, but {type(module).__name__} has a"
            " tensor_parallel_plan(): have that name SequenceParallel layers, or leave it out."
        )
    left: _Left = []
    if callable(given):
        entries = tuple(_given(module, given()))
    else:
        entries, left = _derived(module, _Wanted(num_ranks, is_sharded, loss_parallel, by_sequence))
    if not entries:
        raise ValueError(_nothing_found(module, num_ranks, left))
    plan = Plan(num_ranks, entries, tuple(left), by_sequence)
    return dataclasses.replace(plan, whole_share=_whole_share(module, plan.entries))


def _derived(module: nn.Module, wanted: _Wanted) -> tuple[tuple[Entry, ...], _Left]:
    def inside(name: str, part: nn.Module) -> tuple[list[Entry], _Left]:
        entries: list[Entry] = []
        left: _Left = []
        if isinstance(part, nn.MultiheadAttention):
            left.append((name, "nn.MultiheadAttention has no projections of its own; write q_proj, k_proj, ..."))
        if _runs_in_order(part):
            entries.extend(_pairs_in_sequence(name, part, wanted.num_ranks, left))
        for child, sub in part.named_children():
            found, more = visit(f"{name}.{child}" if name else child, sub)
            entries += found
            left += more
        return entries, left

    def visit(name: str, part: nn.Module) -> tuple[list[Entry], _Left]:
        left: _Left = []
        if attention := _attention(name, part, wanted, left):
            return [attention], left
        if mlp := _mlp(name, part, wanted, left):
            parts, of_parts = inside(name, part)
            # Such as experts, beside the two layers that choose between them.
            is_more = _num_split(module, parts) > _num_split(module, [mlp])
            return (parts, of_parts) if is_more else ([mlp], left)
        parts, of_parts = inside(name, part)
        return parts, left + of_parts

    entries, left = inside("", module)  # the steps of the module itself don't go through its forward
    entries += _experts(module, wanted, left)
    entries = _without_torn(module, entries, left)
    taken = {name for entry in entries for name in entry.styles}
    entries += _vocabularies(module, taken, wanted, left)
    return tuple(_without_torn(module, entries, left)), left


def _without_torn(module: nn.Module, entries: list[Entry], left: _Left) -> list[Entry]:
    """`entries`, less those that would split one of two layers that share a parameter, and not the other one."""
    while torn := torn_layers(module, {name: style for entry in entries for name, style in entry.styles.items()}):
        kept = []
        for entry in entries:
            names = tuple(entry.styles)
            found = next((n for n in torn if n in names or n.startswith(tuple(f"{each}." for each in names))), None)
            if found is None:
                kept.append(entry)
            else:
                left.append((entry.name, f"{found} shares a parameter with {torn[found]}, which is not split as it is"))
        assert len(kept) < len(entries)
        entries = kept
    return entries


def _attention(name: str, part: nn.Module, wanted: _Wanted, left: _Left) -> Entry | None:
    num_ranks = wanted.num_ranks
    linears = _linears(part)
    out = _first(_OUT, linears)
    fused = _first(_FUSED, linears)
    apart = [_first(names, linears) for names in (_QUERY, _KEY, _VALUE)]
    projections = [fused] if fused else [each for each in apart if each]
    if out is None or not (fused or None not in apart) or out in projections:
        return None
    heads, key_heads = _number(part, _HEADS), _number(part, _KEY_HEADS)
    into = ", ".join(projections)
    thirds = fused is None or linears[fused].out_features == 3 * linears[out].in_features
    reason = ""
    if heads is None:
        reason = "it has no `num_heads`"
    elif not thirds or (key_heads not in (None, heads) and fused):
        reason = "q, k and v have unequal parts of it"
    elif heads % num_ranks:
        raise ValueError(
            f"the attention {name!r} ({type(part).__name__}) has {heads} heads, which {num_ranks} tensor-parallel ranks"
            f" can't share equally: choose a `tp` that divides {heads}, or name other layers in tensor_parallel_plan()."
        )
    elif key_heads is not None and key_heads % num_ranks:
        reason = f"{num_ranks} ranks can't share {key_heads} heads of keys and values equally"
    if reason or heads is None:
        widths = [linears[each].out_features for each in projections] + [linears[out].in_features]
        if any(width % num_ranks for width in widths):
            left.append((name, f"its width is no multiple of {num_ranks}"))
            return None
        # By columns and gathered at once, by rows and cut at once: right whatever is between.
        styles: dict[str, ParallelStyle] = {
            f"{name}.{each}": ColwiseParallel(output_layouts=Replicate()) for each in projections
        }
        styles[f"{name}.{out}"] = Rows(Replicate())
        return Entry(name, f"{into} and {out} split, but attention itself done by every rank: {reason}", styles)
    cut: ParallelStyle = (
        FusedColwise(3, cuts_bias=not wanted.is_sharded) if fused else ColwiseParallel(use_local_output=False)
    )
    styles = {name: Region(wanted.by_sequence), **{f"{name}.{each}": cut for each in projections}}
    styles[f"{name}.{out}"] = wanted.last
    what = f"{into} by columns, {out} by rows: {heads // num_ranks} of {heads} heads"
    return Entry(name, what, styles)


def _mlp(name: str, part: nn.Module, wanted: _Wanted, left: _Left) -> Entry | None:
    num_ranks = wanted.num_ranks
    linears = _linears(part)
    if _runs_in_order(part):
        return None  # its pairs need no region
    pairs = _gated(linears) or _chained(list(linears.items()))
    if not pairs:
        return None
    foreign = [m for m in part.modules() if m is not part and not isinstance(m, _IN_MLPS) and _has_tensors(m)]
    if foreign or not all(_has_weight(m) for m in part.modules() if isinstance(m, nn.Linear)):
        return None  # more than an MLP; perhaps there are some inside
    styles: dict[str, ParallelStyle] = {name: Region(wanted.by_sequence)}
    words = []
    for firsts, second in pairs:
        hidden = linears[second].in_features
        if hidden % num_ranks:
            left.append((f"{name}.{second}", f"{hidden} hidden units are no multiple of {num_ranks}"))
            continue
        styles |= {f"{name}.{first}": ColwiseParallel(use_local_output=False) for first in firsts}
        styles[f"{name}.{second}"] = wanted.last
        words.append(
            f"{', '.join(firsts)} by columns, {second} by rows: {hidden // num_ranks} of {hidden} hidden units"
        )
    return Entry(name, "; ".join(words), styles) if words else None


def _gated(linears: Mapping[str, nn.Linear]) -> list[tuple[list[str], str]]:
    """Two layers of one shape, whose outputs meet, and one that takes them: SwiGLU and the like."""
    if len(linears) != 3:
        return []
    down = _first(_DOWN, linears) or list(linears)[-1]
    into = [name for name in linears if name != down]
    shapes = {(linears[name].in_features, linears[name].out_features) for name in into}
    hidden = linears[down].in_features
    return [(into, down)] if len(shapes) == 1 and shapes == {(linears[into[0]].in_features, hidden)} else []


def _chained(linears: list[tuple[str, nn.Linear]]) -> list[tuple[list[str], str]]:
    """Neighbours of which the second takes as many numbers as the first gives; each layer is in one pair at most."""
    pairs, index = [], 0
    while index + 1 < len(linears):
        (first, a), (second, b) = linears[index : index + 2]
        fits = a.out_features == b.in_features
        if fits:
            pairs.append(([first], second))
        index += 2 if fits else 1
    return pairs


def _runs_in_order(part: nn.Module) -> bool:
    """Whether `part` is a `Sequential` without a forward of its own."""
    return isinstance(part, nn.Sequential) and getattr(part.forward, "__func__", None) is nn.Sequential.forward


def _pairs_in_sequence(name: str, part: nn.Module, num_ranks: int, left: _Left) -> Iterator[Entry]:
    """Layers with nothing between them that looks at more than one number at a time.

    The parent is taken to call the whole of `part`, not some of its layers.
    """
    first: str | None = None
    children = dict(part.named_children())
    for child, sub in children.items():
        if not isinstance(sub, nn.Linear) or not _has_weight(sub):
            first = first if isinstance(sub, _ELEMENTWISE) else None
            continue
        if first is None:
            first = child
            continue
        hidden = sub.in_features
        if hidden % num_ranks:
            left.append((f"{name}.{child}", f"{hidden} hidden units are no multiple of {num_ranks}"))
            first = child
            continue
        what = f"{first} by columns, {child} by rows: {hidden // num_ranks} of {hidden} hidden units"
        yield Entry(name, what, {f"{name}.{first}": ColwiseParallel(), f"{name}.{child}": Rows()})
        first = None


def _vocabularies(module: nn.Module, taken: set[str], wanted: _Wanted, left: _Left) -> Iterator[Entry]:
    """Embeddings, each with the output layer that has as many rows."""
    num_ranks = wanted.num_ranks
    inside = tuple(f"{name}." for name in taken)
    free = {n: m for n, m in module.named_modules() if n and n not in taken and not n.startswith(inside)}
    heads = {n: m for n, m in free.items() if isinstance(m, nn.Linear) and _has_weight(m)}
    tables = {n: m for n, m in free.items() if isinstance(m, nn.Embedding) and _has_weight(m)}
    done: set[str] = set()
    for name, table in tables.items():
        fitting = [n for n, m in heads.items() if m.weight.shape == table.weight.shape]
        if name in done or not fitting:
            continue
        head = next((n for n in fitting if heads[n].weight is table.weight), fitting[0])
        alike = [n for n, m in tables.items() if m.weight is table.weight]
        done.update(alike)
        if table.num_embeddings % num_ranks:
            left.append((name, f"{table.num_embeddings} rows are no multiple of {num_ranks}"))
        elif any(tables[n].max_norm or tables[n].sparse or tables[n].scale_grad_by_freq for n in alike):
            left.append((name, "an embedding with max_norm, sparse=True or scale_grad_by_freq=True"))
        else:
            logits = "logits stay cut while training" if wanted.loss_parallel else "logits gathered"
            tied = ", tied" if heads[head].weight is table.weight else ""
            rows = f"{table.num_embeddings // num_ranks} of {table.num_embeddings} rows"
            del heads[head]
            yield Entry(
                ", ".join([*alike, head]),
                f"by the vocabulary{tied}: {rows}, {logits}",
                {**dict.fromkeys(alike, wanted.table), head: Vocabulary(wanted.loss_parallel, wanted.by_sequence)},
            )


def _experts(module: nn.Module, wanted: _Wanted, left: _Left) -> Iterator[Entry]:
    for name, why_whole in dict(find_experts(module, wanted.num_ranks)).items():
        if why_whole:
            left.append((name, why_whole))
        else:
            hidden = module.get_submodule(name).get_parameter("down_proj").shape[2]
            what = f"of each expert {hidden // wanted.num_ranks} of {hidden} hidden units, as transformers' plan has it"
            yield Entry(name, what, {name: Experts(wanted.by_sequence)})


def _given(module: nn.Module, plan: Any) -> Iterator[Entry]:
    """Yields the entries of a module's ``tensor_parallel_plan()``, with ``*`` in names expanded."""
    method = f"{type(module).__name__}.tensor_parallel_plan()"
    if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise ValueError(
            f"{method} must return a dict of sub-modules' names and styles of torch.distributed.tensor.parallel, such"
            f" as {{'net.up': ColwiseParallel(), 'net.down': RowwiseParallel()}}, but got {plan!r}."
        )
    names = [name for name, _ in module.named_modules() if name]
    for pattern, style in plan.items():
        found = [name for name in names if _matches(name, pattern)]
        if not found:
            hint = did_you_mean(pattern, names)
            raise ValueError(f"{method} names {pattern!r}, but the module has no such part.{hint}")
        for name in found:
            yield Entry(name, _described(style), {name: style})


def _described(style: ParallelStyle) -> str:
    return f"{type(style).__name__}, as the module says"


def _matches(name: str, pattern: str) -> bool:
    """As `parallelize_module` has it: ``*`` stands for a part between two dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def _nothing_found(module: nn.Module, num_ranks: int, left: Iterable[tuple[str, str]]) -> str:
    reasons = "".join(f" {name}: {why}." for name, why in _alike(list(left)))
    return (
        f"no layer of {type(module).__name__} is known to be safe to split over {num_ranks} tensor-parallel ranks:"
        " there is no attention with q, k, v and out projections, no MLP of two or three Linear layers, and no"
        f" embedding with an output layer of its size.{reasons} Give the module a method tensor_parallel_plan() that"
        " returns names and styles of torch.distributed.tensor.parallel, such as {'net.up': ColwiseParallel(),"
        " 'net.down': RowwiseParallel()}, or choose 'fsdp'."
    )


def _whole_share(module: nn.Module, entries: Iterable[Entry]) -> float:
    everything = {id(p): p.numel() for p in module.parameters()}
    return 1 - _num_split(module, entries) / max(1, sum(everything.values()))


def _num_split(module: nn.Module, entries: Iterable[Entry]) -> int:
    """Returns how many elements of the parameters are split."""
    split = {
        id(p): p.numel()
        for entry in entries
        for name, style in entry.styles.items()
        if not isinstance(style, Region)
        for p in module.get_submodule(name).parameters()
        if p.dim() > 1 or _cuts_bias(style)
    }
    return sum(split.values())


def _cuts_bias(style: ParallelStyle) -> bool:
    return style.cuts_bias if isinstance(style, FusedColwise) else isinstance(style, (ColwiseParallel, Vocabulary))


def _linears(part: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in part.named_children() if isinstance(child, nn.Linear) and _has_weight(child)}


def _first(names: Iterable[str], linears: Mapping[str, nn.Linear]) -> str | None:
    by_lower = {name.lower(): name for name in linears}
    return next((by_lower[name] for name in names if name in by_lower), None)


def _number(part: nn.Module, names: Iterable[str]) -> int | None:
    """A number that a module, or its ``config``, has as an attribute."""
    owners = (part, getattr(part, "config", None))
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((number for number in found if isinstance(number, int)), None)


def _has_weight(layer: nn.Module) -> bool:
    """Whether its weight is a parameter; with weight_norm and the like it is made of others: left whole."""
    return layer._parameters.get("weight") is not None


def _has_tensors(module: nn.Module) -> bool:
    tables = (module._parameters, module._buffers)
    return any(tensor is not None for table in tables for tensor in table.values())


def _alike(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows that differ in a number of their names only become one."""
    return list(dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), what) for name, what in rows))
