"""The plan of a tensor-parallel module: which layers are split over the ranks, and how.

A module gives its plan by ``tensor_parallel_plan()``; without one, `structure.py` derives it. No process group is
needed for any of this.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...flags import did_you_mean
from .structure import Entry, PlanOptions, Skipped, derive_entries, num_split_elements

__all__ = ["Entry", "Plan", "make_plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
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
) -> Plan:
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
    skipped: Skipped = []
    if callable(user_plan):
        entries = tuple(_user_entries(module, user_plan()))
    else:
        entries, skipped = derive_entries(module, PlanOptions(num_ranks, is_sharded, loss_parallel, by_sequence))
    if not entries:
        raise ValueError(_nothing_found(module, num_ranks, skipped))
    plan = Plan(num_ranks, entries, tuple(skipped), by_sequence)
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
            yield Entry(name, _style_text(style), {name: style})


def _style_text(style: ParallelStyle) -> str:
    return f"{type(style).__name__}, as the module says"


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
    return 1 - num_split_elements(module, entries) / max(1, num_elements)


def _merge_numbered(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges the rows of repeated blocks: names that differ in a number only become one name, with ``*``."""
    return list(dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), text) for name, text in rows))
