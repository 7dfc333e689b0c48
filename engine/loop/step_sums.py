"""Rates of the steps of a run, and sums of the rates and gradients that they use: the same on all ranks, or an error.

A rank that steps at another rate, or leaves out a step, shows in its weights under `ddp`, but not where each rank steps
its own shards.
"""

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._compat.torch import tree_leaves
from ..strategies.parameter_hooks import call_before_use

__all__ = ["StepSums"]

_GRADIENT = attrgetter("grad")


class StepSums:
    """Adds up, for each group of optimizers, the learning rates and the number of gradients of its steps, until closed.

    Args:
        optimizers: those of the run.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._sums: dict[Optimizer, list[list[float]]] = {o: [] for o in optimizers if isinstance(o, Optimizer)}
        # Hooks on all optimizers run before an optimizer's own, by which `zero1` hides gradients.
        self._handles: list[Any] = [register_optimizer_step_pre_hook(partial(call_before_use, self._add))]
        self._handles += [optimizer.register_step_post_hook(self._end) for optimizer in self._sums]
        self._begun: set[Any] = set()
        """The optimizers within a step, where a class may call the step of its parent, with the same hooks."""

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self._begun.discard(optimizer)

    def _add(self, optimizer: Optimizer) -> None:
        sums = self._sums.get(optimizer)
        # None for a copy, which a server steps under `ps`, or for one that the trainer does not know.
        if sums is None or optimizer in self._begun:
            return
        self._begun.add(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            if index == len(sums):
                sums.append([0.0, 0.0])
            rate = group.get("lr")
            if isinstance(rate, float):  # others are tensors of a device, which the host would wait for
                sums[index][0] += rate
            sums[index][1] += sum(map(is_not, map(_GRADIENT, group["params"]), repeat(None)))

    def as_texts(self) -> dict[str, str]:
        """Returns the present rates, and the sums, by what they are of, rounded: machines of two kinds may differ."""
        texts = _rates(self._optimizers)
        for optimizer, groups in self._sums.items():
            for number, (rates, gradients) in enumerate(groups):
                group = f"group {number} of {type(optimizer).__name__}"
                texts[f"the learning rates of the steps of {group}"] = f"{rates:.9g}"
                texts[f"the number of gradients of {group}"] = f"{gradients:.9g}"
        return texts

    def close(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()


def _rates(optimizers: Sequence[Any]) -> dict[str, str]:
    """Returns what schedulers and callbacks set in the groups of optimizers, to 6 digits."""
    return {
        f"{name!r} in group {number} of {type(optimizer).__name__}": " ".join(
            f"{float(value):.6g}" for value in tree_leaves(group[name]) if isinstance(value, int | float | Tensor)
        )
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name in ("lr", "momentum", "betas", "weight_decay")
        if group.get(name) is not None
    }
