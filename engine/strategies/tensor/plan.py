"""The plan of a tensor-parallel module: which layers are split over the ranks, and how.

A module gives its plan by ``tensor_parallel_plan()``; without one, it is derived from the module's structure. No
process group is needed for any of this.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...flags import did_you_mean
from .styles import EmbeddingParallel, Experts, FusedColwise, ParallelRegion, PlainRowwise, VocabParallel, find_experts

__all__ = ["Entry", "make_plan"]

# Derives a tensor-parallel plan from a module's structure: finds its attentions, MLPs, vocabularies and experts.
#
# Follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the first matrix of an MLP and the projections
# to q, k and v are split by columns, so that each rank has some hidden units or heads of its own; the second matrix,
# and the projection out of the attention, by rows; embedding and output layer by the vocabulary. One all-reduce
# forward and one backward for each MLP and each attention. Other layers stay replicated: every rank has all of them.

_QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj")
_KEY = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj")
_VALUE = ("v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj")
_FUSED = ("qkv", "qkv_proj", "c_attn", "wqkv", "to_qkv", "in_proj", "query_key_value")
_OUT = ("o_proj", "out_proj", "out", "o", "wo", "to_out", "out_lin", "c_proj", "proj", "dense")
_DOWN = ("down_proj", "down", "w2", "fc2", "c_proj", "wo", "out", "w3")
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Dropout, nn.Identity),
)
_IN_MLPS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
"""The only layers with parameters that an MLP may have."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A block that is split: its layers, and their styles."""

    name: str
    text: str
    """How it is split, in words."""
    styles: Mapping[str, ParallelStyle]
    """Maps the name of each sub-module to its style."""


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    """The options of a derived plan; see `make_plan`."""

    num_ranks: int
    is_sharded: bool
    loss_parallel: bool
    by_sequence: bool

    def input_style(self, num_parts: int = 1) -> ParallelStyle:
        """The style of a region's first layer, whose output has this number of parts side by side."""
        if num_parts == 1:
            return ColwiseParallel(use_local_output=False)
        return FusedColwise(num_parts, cuts_bias=not self.is_sharded)

    @property
    def output_style(self) -> ParallelStyle:
        """The style of a region's last layer, whose output is summed over the ranks."""
        return RowwiseParallel(output_layouts=Shard(1) if self.by_sequence else None, use_local_output=False)

    @property
    def embedding_style(self) -> ParallelStyle:
        """The style of an embedding."""
        return EmbeddingParallel(self.by_sequence)


_Skipped = list[tuple[str, str]]
"""Names of layers that can't be split, each with the reason; the functions below append to it."""


def _derive_entries(module: nn.Module, options: _PlanOptions) -> tuple[tuple[Entry, ...], _Skipped]:
    """Returns the blocks of `module` that are split, and the layers that can't be.

    Args:
        module: the whole module, not yet split.
        options: options of the plan.

    Raises:
        ValueError: the number of ranks does not divide the heads of an attention.
    """

    def inside(name: str, submodule: nn.Module) -> tuple[list[Entry], _Skipped]:
        entries: list[Entry] = []
        skipped: _Skipped = []
        if isinstance(submodule, nn.MultiheadAttention):
            skipped.append((name, "nn.MultiheadAttention has no projections of its own; write q_proj, k_proj, ..."))
        if _runs_in_order(submodule):
            entries.extend(_sequence_entries(name, submodule, options.num_ranks, skipped))
        for child, sub in submodule.named_children():
            entries_of_child, skipped_of_child = visit(f"{name}.{child}" if name else child, sub)
            entries += entries_of_child
            skipped += skipped_of_child
        return entries, skipped

    def visit(name: str, submodule: nn.Module) -> tuple[list[Entry], _Skipped]:
        skipped: _Skipped = []
        if attention := _attention_entry(name, submodule, options, skipped):
            return [attention], skipped
        if mlp := _mlp_entry(name, submodule, options, skipped):
            inner, skipped_inside = inside(name, submodule)
            # Two layers that look like an MLP may be the router of experts. Then splitting the experts splits more.
            is_more = _num_split_elements(module, inner) > _num_split_elements(module, [mlp])
            return (inner, skipped_inside) if is_more else ([mlp], skipped)
        inner, skipped_inside = inside(name, submodule)
        return inner, skipped + skipped_inside

    entries, skipped = inside("", module)  # the steps of the module itself don't go through its forward
    entries = [_with_adapters(module, entry) for entry in entries]
    entries += _expert_entries(module, options, skipped)
    entries = _without_conflicts(module, entries, skipped)
    taken = {name for entry in entries for name in entry.styles}
    entries += _vocabulary_entries(module, taken, options, skipped)
    return tuple(_without_conflicts(module, entries, skipped)), skipped


def _without_conflicts(module: nn.Module, entries: list[Entry], skipped: _Skipped) -> list[Entry]:
    """Drops entries that would split only one of two layers with a common parameter."""
    while conflicts := _conflicting_ties(module, {name: s for entry in entries for name, s in entry.styles.items()}):
        kept = []
        for entry in entries:
            inside = tuple(f"{name}." for name in entry.styles)
            layer = next((name for name in conflicts if name in entry.styles or name.startswith(inside)), None)
            if layer is None:
                kept.append(entry)
            else:
                reason = f"{layer} shares a parameter with {conflicts[layer]}, which is not split as it is"
                skipped.append((entry.name, reason))
        assert len(kept) < len(entries)
        entries = kept
    return entries


def _attention_entry(name: str, submodule: nn.Module, options: _PlanOptions, skipped: _Skipped) -> Entry | None:
    num_ranks = options.num_ranks
    linears = _linears(submodule)
    out = _first_name(_OUT, linears)
    fused = _first_name(_FUSED, linears)
    apart = [_first_name(names, linears) for names in (_QUERY, _KEY, _VALUE)]
    projections = [fused] if fused else [layer for layer in apart if layer]
    if out is None or not (fused or None not in apart) or out in projections:
        return None
    heads, key_heads = _int_attribute(submodule, _HEADS), _int_attribute(submodule, _KEY_HEADS)
    into = ", ".join(projections)
    thirds = fused is None or linears[fused].out_features == 3 * linears[out].in_features
    reason = ""
    if heads is None:
        reason = "it has no `num_heads`"
    elif not thirds or (key_heads not in (None, heads) and fused):
        reason = "q, k and v have unequal parts of it"
    elif heads % num_ranks:
        raise ValueError(
            f"the attention {name!r} ({type(submodule).__name__}) has {heads} heads, which {num_ranks} tensor-parallel"
            f" ranks can't share equally: choose a `tp` that divides {heads}, or name other layers in"
            " tensor_parallel_plan()."
        )
    elif key_heads is not None and key_heads % num_ranks:
        reason = f"{num_ranks} ranks can't share {key_heads} heads of keys and values equally"
    if reason or heads is None:
        widths = [linears[layer].out_features for layer in projections] + [linears[out].in_features]
        if any(width % num_ranks for width in widths):
            skipped.append((name, f"its width is no multiple of {num_ranks}"))
            return None
        # The projections' outputs are gathered and the last layer's input is split: right for any code in between.
        styles: dict[str, ParallelStyle] = {
            f"{name}.{layer}": ColwiseParallel(output_layouts=Replicate()) for layer in projections
        }
        styles[f"{name}.{out}"] = PlainRowwise(Replicate())
        return Entry(name, f"{into} and {out} split, but attention itself done by every rank: {reason}", styles)
    cut = options.input_style(3 if fused else 1)
    styles = {name: ParallelRegion(options.by_sequence), **{f"{name}.{layer}": cut for layer in projections}}
    styles[f"{name}.{out}"] = options.output_style
    text = f"{into} by columns, {out} by rows: {heads // num_ranks} of {heads} heads"
    return Entry(name, text, styles)


def _mlp_entry(name: str, submodule: nn.Module, options: _PlanOptions, skipped: _Skipped) -> Entry | None:
    num_ranks = options.num_ranks
    linears = _linears(submodule)
    if _runs_in_order(submodule):
        return None  # `_sequence_entries` finds the pairs of a Sequential, which need no region
    pairs = _gated(linears) or _chained(list(linears.items()))
    is_fused = not pairs and _is_fused_gate(linears)
    if is_fused:
        first, second = linears
        pairs = [([first], second)]
    if not pairs:
        return None
    foreign = [m for m in submodule.modules() if m is not submodule and not isinstance(m, _IN_MLPS) and _has_tensors(m)]
    if foreign or not all(_has_weight(m) for m in submodule.modules() if isinstance(m, nn.Linear)):
        return None  # more than an MLP; perhaps it contains MLPs
    styles: dict[str, ParallelStyle] = {name: ParallelRegion(options.by_sequence)}
    words = []
    for firsts, second in pairs:
        hidden = linears[second].in_features
        if hidden % num_ranks:
            skipped.append((f"{name}.{second}", f"{hidden} hidden units are no multiple of {num_ranks}"))
            continue
        styles |= dict.fromkeys((f"{name}.{first}" for first in firsts), options.input_style(2 if is_fused else 1))
        styles[f"{name}.{second}"] = options.output_style
        words.append(
            f"{', '.join(firsts)} by columns, {second} by rows: {hidden // num_ranks} of {hidden} hidden units"
        )
    return Entry(name, "; ".join(words), styles) if words else None


def _gated(linears: Mapping[str, nn.Linear]) -> list[tuple[list[str], str]]:
    """Finds a gated MLP, such as SwiGLU: two layers of one shape, and a third that takes their product."""
    if len(linears) != 3:
        return []
    down = _first_name(_DOWN, linears) or list(linears)[-1]
    into = [name for name in linears if name != down]
    shapes = {(linears[name].in_features, linears[name].out_features) for name in into}
    hidden = linears[down].in_features
    return [(into, down)] if len(shapes) == 1 and shapes == {(linears[into[0]].in_features, hidden)} else []


def _is_fused_gate(linears: Mapping[str, nn.Linear]) -> bool:
    """Whether they are a gated MLP whose gate and up projection are one layer, before one that takes their product.

    Two layers of such sizes may be something else, such as mean and variance of a random value: the name decides.
    """
    if len(linears) != 2:
        return False
    first, second = linears.values()
    return first.out_features == 2 * second.in_features and linears.get(_first_name(_DOWN, linears) or "") is second


def _chained(linears: list[tuple[str, nn.Linear]]) -> list[tuple[list[str], str]]:
    """Pairs neighbours where the second one's input is as wide as the first one's output; a layer is in one pair."""
    pairs, index = [], 0
    while index + 1 < len(linears):
        (first, a), (second, b) = linears[index : index + 2]
        fits = a.out_features == b.in_features
        if fits:
            pairs.append(([first], second))
        index += 2 if fits else 1
    return pairs


def _runs_in_order(submodule: nn.Module) -> bool:
    """Whether `submodule` is a `Sequential` without a forward of its own."""
    return (
        isinstance(submodule, nn.Sequential) and getattr(submodule.forward, "__func__", None) is nn.Sequential.forward
    )


def _sequence_entries(name: str, submodule: nn.Module, num_ranks: int, skipped: _Skipped) -> Iterator[Entry]:
    """Finds pairs of Linear layers in a Sequential with elementwise layers only between them.

    This assumes that the parent calls `submodule` as a whole, rather than some of its layers.
    """
    first: str | None = None
    children = dict(submodule.named_children())
    for child, sub in children.items():
        sub = _without_adapter(sub)
        if not isinstance(sub, nn.Linear) or not _has_weight(sub):
            first = first if isinstance(sub, _ELEMENTWISE) else None
            continue
        if first is None:
            first = child
            continue
        hidden = sub.in_features
        if hidden % num_ranks:
            skipped.append((f"{name}.{child}", f"{hidden} hidden units are no multiple of {num_ranks}"))
            first = child
            continue
        text = f"{first} by columns, {child} by rows: {hidden // num_ranks} of {hidden} hidden units"
        yield Entry(name, text, {f"{name}.{first}": ColwiseParallel(), f"{name}.{child}": PlainRowwise()})
        first = None


def _vocabulary_entries(
    module: nn.Module, taken: set[str], options: _PlanOptions, skipped: _Skipped
) -> Iterator[Entry]:
    """Pairs each embedding with an output layer of the same shape: [vocabulary, width]."""
    num_ranks = options.num_ranks
    inside = tuple(f"{name}." for name in taken)
    free = {n: m for n, m in module.named_modules() if n and n not in taken and not n.startswith(inside)}
    heads = {n: m for n, m in free.items() if isinstance(m, nn.Linear) and _has_weight(m) and not _is_of_adapter(n)}
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
            skipped.append((name, f"{table.num_embeddings} rows are no multiple of {num_ranks}"))
        elif any(tables[n].max_norm or tables[n].sparse or tables[n].scale_grad_by_freq for n in alike):
            skipped.append((name, "an embedding with max_norm, sparse=True or scale_grad_by_freq=True"))
        else:
            logits = "logits stay cut while training" if options.loss_parallel else "logits gathered"
            tied = ", tied" if heads[head].weight is table.weight else ""
            rows = f"{table.num_embeddings // num_ranks} of {table.num_embeddings} rows"
            del heads[head]
            yield Entry(
                ", ".join([*alike, head]),
                f"by the vocabulary{tied}: {rows}, {logits}",
                {
                    **dict.fromkeys(alike, options.embedding_style),
                    head: VocabParallel(options.loss_parallel, options.by_sequence),
                },
            )


def _expert_entries(module: nn.Module, options: _PlanOptions, skipped: _Skipped) -> Iterator[Entry]:
    for name, why_whole in dict(find_experts(module, options.num_ranks)).items():
        if why_whole:
            skipped.append((name, why_whole))
        else:
            hidden = module.get_submodule(name).get_parameter("down_proj").shape[2]
            text = (
                f"of each expert {hidden // options.num_ranks} of {hidden} hidden units, as transformers' plan has it"
            )
            yield Entry(name, text, {name: Experts(options.by_sequence)})


def _num_split_elements(module: nn.Module, entries: Iterable[Entry]) -> int:
    """Returns how many elements of the parameters are split."""
    split = {
        id(p): p.numel()
        for entry in entries
        for name, style in entry.styles.items()
        if not isinstance(style, ParallelRegion)
        for p in module.get_submodule(name).parameters()
        if p.dim() > 1 or _cuts_bias(style)
    }
    return sum(split.values())


def _cuts_bias(style: ParallelStyle) -> bool:
    return style.cuts_bias if isinstance(style, FusedColwise) else isinstance(style, (ColwiseParallel, VocabParallel))


def _linears(submodule: nn.Module) -> dict[str, nn.Linear]:
    children = {name: _without_adapter(child) for name, child in submodule.named_children()}
    return {name: child for name, child in children.items() if isinstance(child, nn.Linear) and _has_weight(child)}


def _first_name(names: Iterable[str], linears: Mapping[str, nn.Linear]) -> str | None:
    by_lower = {name.lower(): name for name in linears}
    return next((by_lower[name] for name in names if name in by_lower), None)


def _int_attribute(submodule: nn.Module, names: Iterable[str]) -> int | None:
    """Returns the first of these attributes of a module, or of its ``config``, that is an int."""
    owners = (submodule, getattr(submodule, "config", None))
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _has_weight(layer: nn.Module) -> bool:
    """Whether its weight is a parameter. With weight_norm and the like it is computed from others, and not split."""
    return layer._parameters.get("weight") is not None


def _has_tensors(module: nn.Module) -> bool:
    tables = (module._parameters, module._buffers)
    return any(tensor is not None for table in tables for tensor in table.values())


# --- layers with adapters
# Layers of peft's LoRA, which add the output of two small layers, A and B, to that of the layer itself. Of a layer that
# is split by columns B is split alike, and A of one that is split by rows; the other one is whole.


def _without_adapter(layer: nn.Module) -> nn.Module:
    """The layer itself, or the one that an adapter was added to."""
    base = getattr(layer, "base_layer", None)
    return base if isinstance(base, nn.Linear) and hasattr(layer, "lora_A") else layer


def _is_of_adapter(name: str) -> bool:
    return ".base_layer" in name or ".lora_" in name


def _with_adapters(module: nn.Module, entry: Entry) -> Entry:
    """Splits layers with adapters and the adapters, where `entry` names what holds both."""
    styles: dict[str, ParallelStyle] = {}
    for name, style in entry.styles.items():
        layer: Any = module.get_submodule(name)
        if _without_adapter(layer) is layer:
            styles[name] = style
            continue
        styles[f"{name}.base_layer"] = style
        adapter = "lora_A" if isinstance(style, RowwiseParallel) else "lora_B"
        styles |= {f"{name}.{adapter}.{key}": style for key in getattr(layer, adapter)}
    return dataclasses.replace(entry, styles=styles)


# --- tied weights
# Checks that layers with a common parameter (tied weights) are split in the same way, or not at all.


def _conflicting_ties(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Returns the layers that share a parameter with a layer which `styles` splits in another way.

    Args:
        module: the whole module.
        styles: the style of each split sub-module, by its name.

    Returns:
        Maps the name of such a layer to the name of the other one.
    """
    regions = tuple(f"{name}." for name, style in styles.items() if isinstance(style, ParallelRegion))
    holders: dict[nn.Parameter, dict[str, str]] = defaultdict(dict)
    for name, submodule in module.named_modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                inside = f"{name}.".startswith(regions)
                holders[parameter][name] = _cut(styles.get(name), submodule, key, inside)
    conflicts = {}
    for cuts in holders.values():
        for name, cut in cuts.items():
            other = next((other_name for other_name in cuts if cuts[other_name] != cut), None)
            if other is not None:
                conflicts[name] = other
    return conflicts


def _cut(style: ParallelStyle | None, submodule: nn.Module, key: str, is_in_region: bool) -> str:
    """Returns a word for how a style splits a parameter: the same word for parameters that are split alike."""
    if style is None or isinstance(style, ParallelRegion):
        return "replica" if is_in_region else "whole"
    if isinstance(style, FusedColwise):
        return f"{style.num_parts} parts" if key == "weight" or style.cuts_bias else "replica"
    if isinstance(style, RowwiseParallel) == isinstance(submodule, nn.Embedding):  # the rows of a table are its entries
        return "by dim 0"
    return "by dim 1" if key == "weight" else "replica"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The plan of what is split over `num_ranks` ranks; prints as a table."""

    num_ranks: int
    entries: tuple[Entry, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Names of layers that could not be split, each with the reason."""
    by_sequence: bool = False
    """Whether activations between the blocks are split by time."""
    replicated_share: float = 0.0
    """Share of the parameters, 0 to 1, that are not split: every rank has all of them."""

    @property
    def styles(self) -> dict[str, ParallelStyle]:
        """Maps the name of each sub-module to its style, parents before their children."""
        return {name: style for entry in self.entries for name, style in entry.styles.items()}

    def __str__(self) -> str:
        rows = [(entry.name, entry.text) for entry in self.entries]
        rows += [(name, f"whole: {why}") for name, why in self.skipped]
        rows = _merge_numbered(rows)
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"  {name:{width}}  {text}" for name, text in rows]
        share = f"{self.replicated_share:.1%}"
        title = f"Split over {self.num_ranks} tensor-parallel ranks ({share} of the parameters are not):"
        if self.by_sequence:
            lines.append("  between them, activations are split by the sequence")
        return "\n".join([title, *lines])


def make_plan(
    module: nn.Module,
    num_ranks: int,
    *,
    is_sharded: bool = False,
    loss_parallel: bool = False,
    by_sequence: bool = False,
) -> _Plan:
    """Returns the plan that the module gives by ``tensor_parallel_plan()``, or one derived from its structure.

    Args:
        module: the whole module, not yet split.
        num_ranks: size of the mesh axis ``tp``.
        is_sharded: whether FSDP2 shards the split parameters as well.
        loss_parallel: leave the logits of a training step sharded by the vocabulary.
        by_sequence: between the regions, shard activations [batch, time, ...] by time: norms, dropout, residuals.

    Raises:
        ValueError: `num_ranks` does not divide the heads, the module has no sub-module of a given name, or no layer can
            be split.
    """
    user_plan = getattr(module, "tensor_parallel_plan", None)
    if callable(user_plan) and by_sequence:
        raise ValueError(
            f"sequence_parallel=true is for plans that are derived, but {type(module).__name__} has a"
            " tensor_parallel_plan(): have that name SequenceParallel layers, or leave it out."
        )
    skipped: _Skipped = []
    if callable(user_plan):
        entries = tuple(_user_entries(module, user_plan()))
    else:
        entries, skipped = _derive_entries(module, _PlanOptions(num_ranks, is_sharded, loss_parallel, by_sequence))
    if not entries:
        raise ValueError(_nothing_found(module, num_ranks, skipped))
    plan = _Plan(num_ranks, entries, tuple(skipped), by_sequence)
    return dataclasses.replace(plan, replicated_share=_replicated_share(module, plan.entries))


def _user_entries(module: nn.Module, plan: Any) -> Iterator[Entry]:
    """Yields the entries of a module's ``tensor_parallel_plan()``, with ``*`` in names expanded."""
    method = f"{type(module).__name__}.tensor_parallel_plan()"
    if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise ValueError(
            f"{method} must return a dict of sub-modules' names and styles of torch.distributed.tensor.parallel, such"
            f" as {{'net.up': ColwiseParallel(), 'net.down': RowwiseParallel()}}, but got {plan!r}."
        )
    names = [name for name, _ in module.named_modules() if name]
    for pattern, style in plan.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            hint = did_you_mean(pattern, names)
            raise ValueError(f"{method} names {pattern!r}, but the module has no such part.{hint}")
        for name in matching:
            yield _with_adapters(module, Entry(name, f"{type(style).__name__}, as the module says", {name: style}))


def _matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern of `parallelize_module`: ``*`` stands for one part between two dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def _nothing_found(module: nn.Module, num_ranks: int, skipped: Iterable[tuple[str, str]]) -> str:
    reasons = "".join(f" {name}: {why}." for name, why in _merge_numbered(list(skipped)))
    return (
        f"no layer of {type(module).__name__} is known to be safe to split over {num_ranks} tensor-parallel ranks:"
        " there is no attention with q, k, v and out projections, no MLP of two or three Linear layers, and no"
        f" embedding with an output layer of its size.{reasons} Give the module a method tensor_parallel_plan() that"
        " returns names and styles of torch.distributed.tensor.parallel, such as {'net.up': ColwiseParallel(),"
        " 'net.down': RowwiseParallel()}, or choose 'fsdp'."
    )


def _replicated_share(module: nn.Module, entries: Iterable[Entry]) -> float:
    num_elements = sum({id(p): p.numel() for p in module.parameters()}.values())
    return 1 - _num_split_elements(module, entries) / max(1, num_elements)


def _merge_numbered(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges the rows of repeated blocks: names that differ in a number only become one name, with ``*``."""
    return list(dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), text) for name, text in rows))
