"""Layers that share a parameter have to be split in the same way, or not at all."""

from collections import defaultdict
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from .styles import FusedColwise, Region

__all__ = ["torn_layers"]


def torn_layers(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Layers that share a parameter with others, which `styles` does not split as them.

    Args:
        module: the whole one.
        styles: of its sub-modules, by their names.

    Returns:
        The name of such a layer, and that of one that it shares a parameter with.
    """
    regions = tuple(f"{name}." for name, style in styles.items() if isinstance(style, Region))
    holders: dict[nn.Parameter, dict[str, str]] = defaultdict(dict)
    for name, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                inside = f"{name}.".startswith(regions)
                holders[parameter][name] = _cut(styles.get(name), part, key, inside)
    torn = {}
    for cuts in holders.values():
        for name, cut in cuts.items():
            other = next((each for each in cuts if cuts[each] != cut), None)
            if other is not None:
                torn[name] = other
    return torn


def _cut(style: ParallelStyle | None, part: nn.Module, key: str, is_in_region: bool) -> str:
    """Describes how a style cuts a parameter; the words are the same for what is cut in the same way."""
    if style is None or isinstance(style, Region):
        return "replica" if is_in_region else "whole"
    if isinstance(style, FusedColwise):
        return f"{style.num_parts} parts" if key == "weight" or style.cuts_bias else "replica"
    if isinstance(style, RowwiseParallel) == isinstance(part, nn.Embedding):  # the rows of a table are its entries
        return "by dim 0"
    return "by dim 1" if key == "weight" else "replica"
