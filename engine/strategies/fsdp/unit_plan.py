"""Plans the units that `fsdp` and `hsdp` gather as one, and how long each of them stays whole.

As torchtitan's `apply_fsdp` (https://github.com/pytorch/torchtitan): each repeated block is a unit, and so are a large
embedding and a large output layer, which the last unit, all else, would hold whole throughout a step. The unit that
runs last is kept from forward to backward, which needs it first.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..units import named_blocks, shard_units, untied
from .direct_use import ANY, weights_used_in

__all__ = ["Unit", "describe_units", "large_layers", "plan_units"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module that is gathered as one."""

    module: nn.Module
    name: str
    is_block: bool
    """Whether it is one of the repeated blocks, or of those that the module names."""
    is_kept: bool
    """Whether it stays whole from its forward to its backward."""

    @property
    def numel(self) -> int:
        """Number of values that are gathered."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def until(self) -> str:
        """How long the unit stays whole, in words."""
        return "kept until its backward" if self.is_kept else "freed after its forward"


def describe_units(module: nn.Module) -> str:
    """The plan, with a line for each unit, or for each run of alike ones."""
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
    """The units of `module`, in the order of its sub-modules; everything else of it forms one more.

    Args:
        module: whole, on any device.
        takes_layers: whether large layers outside of the blocks are units as well.

    Raises:
        ValueError: see `shard_units`.
    """
    blocks = shard_units(module)
    layers = large_layers(module) if takes_layers else []
    chosen = {*blocks, *layers}
    in_order = [(name, part) for name, part in module.named_modules() if part in chosen]
    last = in_order[-1][1] if in_order else None
    return [Unit(module=part, name=name, is_block=part in set(blocks), is_kept=part is last) for name, part in in_order]


def large_layers(module: nn.Module) -> list[nn.Module]:
    """The embeddings before or behind the blocks, and the linear layer behind them, with half of a block's values.

    Not where the module names its units itself, nor those that share a parameter, and none whose weight some forward
    uses without calling the layer.
    """
    blocks = named_blocks(module)
    if callable(getattr(module, "shard_units", None)) or not blocks:
        return []
    least = max(sum(p.numel() for p in block.parameters()) for block in blocks) / 2
    places = {part: place for place, part in enumerate(module.modules())}
    found = [(name, layer) for name, layer in _called(module, "", set(blocks)) if layer.weight.numel() >= least]
    heads = [layer for _, layer in found if type(layer) is nn.Linear and places[layer] > places[blocks[-1]]]
    found = [(name, layer) for name, layer in found if type(layer) is nn.Embedding or layer in heads[-1:]]
    used = weights_used_in(module) if found else set()
    return untied(module, [layer for name, layer in found if ANY not in used and name not in used])


def _called(part: nn.Module, name: str, blocks: set[nn.Module]) -> Iterator[tuple[str, nn.Embedding | nn.Linear]]:
    """Layers below `part` that its code calls, with the names of their attributes.

    Without linear layers that have a bias: their output is a view, and where code writes into one, FSDP2 does not
    hear of its backward.
    """
    if type(part).__module__.startswith("torch.") and not isinstance(part, _CONTAINERS):
        return  # torch's own modules may take the weights of theirs
    for key, child in part.named_children():
        if child in blocks:
            continue
        if isinstance(child, nn.Embedding) and type(child) is nn.Embedding:
            if child.max_norm is None:  # else its forward writes
                yield key, child
        elif isinstance(child, nn.Linear) and type(child) is nn.Linear:
            if child.bias is None:
                yield key, child
        else:
            yield from _called(child, key, blocks)
