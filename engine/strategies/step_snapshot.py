"""A snapshot of the state that a step may change, to undo the step."""

import collections
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ..checkpoint import get_random_state, set_random_state

__all__ = ["StepSnapshot"]

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
# Attributes of every module. A step does not change parameters, and FSDP swaps them in and out of its modules.
_OF_MODULES = frozenset(nn.Module().__dict__) - {"_buffers", "training"}


class StepSnapshot:
    """The current attributes of some objects, and the random state.

    It has the buffers and plain attributes of modules and their sub-modules, and the attributes of other objects.
    Tensor attributes are recorded by value, so that changes in place are undone, as in states of torchmetrics. Lists,
    dicts and sets are recorded with their items, to any depth. Tensors in containers, and all other objects, are
    recorded by identity only. Parameters, gradients and optimizers are not recorded.

    Args:
        owners: modules, a `_ResultCollection`, or other objects with attributes.
        random: record the state of the random generators, too.
        leaves_out: whether an owner and what it has, or the values of a tensor, are not recorded.
    """

    def __init__(
        self, *owners: Any, random: bool = True, leaves_out: Callable[[Any], bool] = lambda owner: False
    ) -> None:
        self._leaves_out = leaves_out
        self._random = get_random_state() if random else None
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._owners: dict[int, Any] = {}
        for owner in owners:
            self._remember_owner(owner)

    def _remember_owner(self, owner: Any) -> None:
        if id(owner) in self._owners or self._leaves_out(owner):
            return
        self._owners[id(owner)] = owner
        skipped = _OF_MODULES if isinstance(owner, nn.Module) else frozenset()
        attributes = {name: value for name, value in owner.__dict__.items() if name not in skipped}
        self._attributes.append((owner, attributes))
        for value in (*attributes.values(), *owner.__dict__.get("_buffers", {}).values()):
            if isinstance(value, Tensor) and not self._leaves_out(value):
                self._values[id(value)] = value, value.detach().clone()
            else:
                self._remember(value)
        if isinstance(owner, _CONTAINERS):  # for example a `_ResultCollection`, a dict of metrics
            self._remember_contents(owner)
        if isinstance(owner, nn.Module):
            for child in owner.children():
                self._remember_owner(child)

    def _remember(self, value: Any) -> None:
        if isinstance(value, Metric):  # a metric that is not a sub-module
            self._remember_owner(value)
        elif type(value) in _CONTAINERS and id(value) not in self._contents:
            self._remember_contents(value)

    def _remember_contents(self, container: Any) -> None:
        items = dict(container) if isinstance(container, dict) else list(container)
        self._contents[id(container)] = container, items
        for item in items.values() if isinstance(items, dict) else items:
            self._remember(item)

    @property
    def owners(self) -> Collection[Any]:
        """The objects whose attributes are recorded: those that were passed, their sub-modules, and metrics."""
        return self._owners.values()

    def undo(self, *, keeps_counts: bool = False) -> None:
        """Restores everything: the same objects, with their content.

        Args:
            keeps_counts: plain integers and booleans of modules stay as they are.
        """
        for owner, before in self._attributes:
            present = owner.__dict__
            if keeps_counts and isinstance(owner, nn.Module) and not isinstance(owner, Metric):
                before = {**before, **{name: value for name, value in present.items() if type(value) in (int, bool)}}
            skipped = _OF_MODULES if "_modules" in present else frozenset()
            for name in [name for name in present if name not in before and name not in skipped]:
                del present[name]
            present.update(before)
        for container, items in self._contents.values():
            container.clear()
            (container.extend if isinstance(container, (list, collections.deque)) else container.update)(items)
        with torch.no_grad():
            for tensor, value in self._values.values():
                tensor.copy_(value)
        if self._random is not None:
            set_random_state(self._random)
