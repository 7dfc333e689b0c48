"""Checks that layers with a common parameter (tied weights) are split in the same way, or not at all."""

from collections import defaultdict
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from .styles import FusedColwise, ParallelRegion

__all__ = ["conflicting_ties"]


def conflicting_ties(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
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
