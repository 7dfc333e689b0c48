"""A snapshot of what a step may change, to undo a step that was run."""

import collections
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
    """The present attributes of some objects, and the random state.

    Remembered are: of a module and each module in it, its buffers and plain attributes; of any other object, its
    attributes. Tensors among them by their values, also those that are changed in place, as states of torchmetrics are.
    Lists, dicts and sets by what is in them, to any depth. Of tensors in containers, and of all other objects, only
    which one it was. Parameters, gradients and optimizers are not remembered.

    Args:
        owners: modules, a `_ResultCollection`, or other objects with attributes.
        random: remember the state of the random generators too.
    """

    def __init__(self, *owners: Any, random: bool = True) -> None:
        self._random = get_random_state() if random else None
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._owners: dict[int, Any] = {}
        for owner in owners:
            self._remember_owner(owner)

    def _remember_owner(self, owner: Any) -> None:
        if id(owner) in self._owners:
            return
        self._owners[id(owner)] = owner
        skipped = _OF_MODULES if isinstance(owner, nn.Module) else frozenset()
        attributes = {name: value for name, value in owner.__dict__.items() if name not in skipped}
        self._attributes.append((owner.__dict__, attributes))
        for value in (*attributes.values(), *owner.__dict__.get("_buffers", {}).values()):
            if isinstance(value, Tensor):
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

    def undo(self) -> None:
        """Restores all of it: the same objects, with their content."""
        for present, before in self._attributes:
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
