"""Plans the units that `fsdp` and `hsdp` gather together, and how long each of them stays whole.

Follows torchtitan's `apply_fsdp` (https://github.com/pytorch/torchtitan): each repeated block is a unit, and so are a
large embedding and a large output layer. Without that they would belong to the root unit, the rest of the module, which
stays whole throughout a step. The unit that runs last is kept from forward to backward, which needs it first.
"""

import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..units import named_blocks, shard_units, untied

__all__ = ["ANY", "Unit", "describe_units", "plan_units", "weights_used_in"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered together."""

    module: nn.Module
    name: str
    is_block: bool
    """Whether it is one of the repeated blocks, or one that the module names."""
    is_kept: bool
    """Whether it stays whole from its forward to its backward."""

    @property
    def numel(self) -> int:
        """Number of values that are gathered."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def until(self) -> str:
        """Describes how long the unit stays whole."""
        return "kept until its backward" if self.is_kept else "freed after its forward"


def describe_units(module: nn.Module) -> str:
    """The plan as text, with a line for each unit or group of equal consecutive units."""
    units = plan_units(module)
    lines = []
    for (numel, until), group in itertools.groupby(units, key=lambda unit: (unit.numel, unit.until)):
        alike = list(group)
        several = f" to {alike[-1].name} ({len(alike)})" if len(alike) > 1 else ""
        lines.append(f"  {alike[0].name}{several}: {numel:,} values{' each' if several else ''}, {until}")
    inside = {parameter for unit in units for parameter in unit.module.parameters()}
    rest = sum(parameter.numel() for parameter in module.parameters() if parameter not in inside)
    return "\n".join(["Units of fsdp and hsdp:", *lines, f"  all else: {rest:,} values, whole throughout a step"])


def plan_units(module: nn.Module, *, takes_layers: bool = True) -> list[Unit]:
    """The units of `module`, in the order of its sub-modules; the rest of it forms one more.

    Args:
        module: whole, on any device.
        takes_layers: whether large layers outside of the blocks are units as well.

    Raises:
        ValueError: see `shard_units`.
    """
    blocks = shard_units(module)
    layers = _large_layers(module) if takes_layers else []
    whole_blocks = set(blocks)
    chosen = whole_blocks.union(layers)
    in_order = [(name, submodule) for name, submodule in module.named_modules() if submodule in chosen]
    last = in_order[-1][1] if in_order else None
    return [
        Unit(module=submodule, name=name, is_block=submodule in whole_blocks, is_kept=submodule is last)
        for name, submodule in in_order
    ]


def _large_layers(module: nn.Module) -> list[nn.Module]:
    """The embeddings before or after the blocks, and the linear layer after them, with half of a block's values or
    more.

    Empty if the module names its units itself. Layers that share a parameter are left out, and those whose weight some
    forward uses without calling the layer.
    """
    blocks = named_blocks(module)
    if callable(getattr(module, "shard_units", None)) or not blocks:
        return []
    least = max(sum(p.numel() for p in block.parameters()) for block in blocks) / 2
    places = {submodule: index for index, submodule in enumerate(module.modules())}
    large = [(name, layer) for name, layer in _called(module, "", set(blocks)) if layer.weight.numel() >= least]
    heads = [layer for _, layer in large if type(layer) is nn.Linear and places[layer] > places[blocks[-1]]]
    large = [(name, layer) for name, layer in large if type(layer) is nn.Embedding or layer in heads[-1:]]
    used = weights_used_in(module) if large else set()
    return untied(module, [layer for name, layer in large if ANY not in used and name not in used])


def _called(submodule: nn.Module, name: str, blocks: set[nn.Module]) -> Iterator[tuple[str, nn.Embedding | nn.Linear]]:
    """Layers below `submodule` that its code calls, with their names.

    Linear layers with a bias are left out: their output is a view, and if code writes into it, FSDP2 does not notice
    its backward.
    """
    if type(submodule).__module__.startswith("torch.") and not isinstance(submodule, _CONTAINERS):
        return  # torch's own modules may use the weights of their layers directly
    for key, child in submodule.named_children():
        if child in blocks:
            continue
        if isinstance(child, nn.Embedding) and type(child) is nn.Embedding:
            if child.max_norm is None:  # otherwise its forward writes to its weight
                yield key, child
        elif isinstance(child, nn.Linear) and type(child) is nn.Linear:
            if child.bias is None:
                yield key, child
        else:
            yield from _called(child, key, blocks)


# Finds layers whose weights a forward uses without calling the layer, by reading its source.
#
# Under `fsdp` a layer that is a unit is whole only while its own forward runs. In the forward of another module,
# `functional.linear(x, self.embed.weight)` would use a shard.

ANY = "*"
"""Placeholder for a layer that the source does not name: a variable, or an element of a list."""

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_FOREIGN = ("torch", "lightning", "torchmetrics")
_WEIGHTS = frozenset({"weight", "bias"})
_COMMON = frozenset({*dir(Tensor), *dir(nn.Module)})
"""Names that are usually methods of tensors, not of the user's modules: `x.to(...)`."""
_HARMLESS = frozenset({"device", "dtype", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})

_OF_ALL_WEIGHTS = frozenset({"parameters", "named_parameters", "get_parameter", "state_dict", "_parameters"})


def weights_used_in(module: nn.Module, *, strictly: bool = False) -> set[str]:
    """The attributes whose `weight` or `bias` is used by `module` in any forward or step: ``{"head"}``.

    Called functions are followed if a name identifies them. A module's own weight (`self.weight`) does not count.

    Args:
        module: any module; FSDP2 may have replaced the classes of its parts.
        strictly: whether to read a weight's dtype counts, and to go through all parameters.
    """
    classes = {kind for submodule in module.modules() for kind in type(submodule).__mro__ if not _is_foreign(kind)}
    waiting = [getattr(kind, entry, None) for kind in classes for entry in _ENTRIES]
    seen: set[types.CodeType] = set()
    attributes: set[str] = set()
    while waiting:
        function = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, types.FunctionType) or _is_foreign(function) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        tree = _parsed(function)
        if tree is None:
            return {ANY}
        attributes |= set(_layers(tree, strictly))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr not in _COMMON:
                waiting += [getattr(kind, node.attr, None) for kind in classes]
            elif isinstance(node, ast.Name):
                waiting.append(function.__globals__.get(node.id))
    return attributes


def _is_foreign(candidate: Any) -> bool:
    return str(getattr(candidate, "__module__", "")).partition(".")[0] in _FOREIGN


def _parsed(function: types.FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # for example typed into a prompt
        return None


def _layers(tree: ast.AST, strictly: bool) -> Iterator[str]:
    names = _HARMLESS - {"dtype"} if strictly else _HARMLESS
    harmless = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in names}
    for node in ast.walk(tree):
        if strictly and isinstance(node, ast.Attribute) and node.attr in _OF_ALL_WEIGHTS:
            yield ANY
        if isinstance(node, ast.Attribute) and node.attr in _WEIGHTS and id(node) not in harmless:
            if isinstance(node.value, ast.Attribute):
                yield node.value.attr
            elif not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield ANY
        elif isinstance(node, ast.Call) and _asks_for_weight(node.func, node.args):
            yield ANY


def _asks_for_weight(function: ast.expr, arguments: Collection[ast.expr]) -> bool:
    names = {argument.value for argument in arguments if isinstance(argument, ast.Constant)}
    return isinstance(function, ast.Name) and function.id == "getattr" and not _WEIGHTS.isdisjoint(names)
