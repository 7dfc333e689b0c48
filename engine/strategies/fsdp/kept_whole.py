"""Parameters that FSDP2 can't cut into shards: every rank keeps them whole, and their gradients are averaged here.

A parameter without a dim has nothing to cut. A parameter of another dtype can't be gathered in one tensor with the rest
of its unit. A complex parameter, if it were cut, would get other updates than in one process. All of these are FSDP2's
`ignored_params`.

Communication: per backward that averages, one all-reduce of each gradient when it is complete; backward waits for it.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import CountingGroup
from .unit_order import Call, UnitOrder

__all__ = ["KeptWhole", "kept_whole", "members_by_unit", "refuse_fused"]


def kept_whole(model: nn.Module, units: Collection[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters that can't be sharded, by name: without a dim, complex, or of a rarer dtype in a unit.

    Warns of the last two kinds, since every rank needs memory for them and their optimizer state.

    Args:
        model: with all its parameters, on any device.
        units: its modules that will be units; everything outside of them is one more unit.
    """
    unshardable: dict[str, nn.Parameter] = {}
    rare: dict[str, nn.Parameter] = {}
    by_unit: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for unit, name, part in members_by_unit(model, model, units, ""):
        for key, parameter in part.named_parameters(recurse=False):
            path = f"{name}.{key}".lstrip(".")
            if parameter.dim() == 0:
                unshardable[path] = parameter
            elif parameter.is_complex():
                rare[path] = parameter
            elif parameter.requires_grad:  # torch: the dtypes of the others may differ
                by_unit.setdefault(unit, {})[path] = parameter
    for of_unit in by_unit.values():
        sizes: Counter[torch.dtype] = Counter()
        for parameter in of_unit.values():
            sizes[parameter.dtype] += parameter.numel()
        rare |= {path: p for path, p in of_unit.items() if p.dtype != max(sizes, key=lambda dtype: sizes[dtype])}
    if rare:
        num_bytes = sum(p.numel() * p.element_size() for p in rare.values())
        names = ", ".join(f"{path} ({parameter.dtype})" for path, parameter in rare.items())
        warnings.warn(
            f"every rank keeps the whole of {names} ({num_bytes:,} bytes): parameters that are sharded together must"
            " have one real dtype, that of most of the unit. To shard real ones too, return their module as a unit from"
            " `shard_units()`.",
            stacklevel=2,
        )
    return unshardable | rare


def members_by_unit(
    submodule: nn.Module, unit: nn.Module, units: Collection[nn.Module], name: str
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """`submodule` and all modules below it, each with its unit and name."""
    unit = submodule if submodule in units else unit
    yield unit, name, submodule
    for key, child in submodule.named_children():
        yield from members_by_unit(child, unit, units, f"{name}.{key}".lstrip("."))


def refuse_fused(optimizers: Iterable[torch.optim.Optimizer], whole: dict[str, nn.Parameter], flag: str) -> None:
    """Checks that no optimizer handles whole parameters and shards in one operation, which torch can't do.

    Raises:
        ValueError: an optimizer does.
    """
    names = {id(parameter): name for name, parameter in whole.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            asked = next((key for key in ("foreach", "fused") if group.get(key)), None)
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            if asked and own and len(own) < len(group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} was given {asked}=True, but under {flag} every rank keeps"
                    f" {', '.join(own)} whole beside shards of the others, and one operation can't take both: leave"
                    f" {asked} out, or put these parameters into a group of their own with {asked}=False."
                )


class KeptWhole:
    """Averages the gradients of whole parameters over the ranks, each when a backward has completed it.

    Within an accumulation window the gradients add up on each rank; the last micro-batch averages the sum.

    Args:
        parameters: by name; the same on all ranks.
        wire: group of the ranks with different samples.
        order: checks that all ranks average the same gradients in the same order; None with one rank.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], wire: CountingGroup, order: UnitOrder | None) -> None:
        self.is_held = False
        """Whether gradients are kept and not sent: within an accumulation window."""
        self.wire = wire
        self._order = order
        self._handles: list[Any] = []
        for name, parameter in parameters.items():
            unit = -1 if order is None else order.add(name)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch accepts a hook only then; the parameter may be unfrozen later

            def average(parameter: Tensor, unit: int = unit) -> None:
                self._average(parameter, unit)

            self._handles.append(parameter.register_post_accumulate_grad_hook(average))
            parameter.requires_grad_(trained)

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _average(self, parameter: Tensor, unit: int) -> None:
        if self.is_held or parameter.grad is None:
            return
        if self._order is not None:
            self._order.check(Call("reduce", unit, 1))
        self.wire.bucket = unit
        with torch.no_grad():
            self.wire.all_reduce(parameter.grad).div_(self.wire.size)
