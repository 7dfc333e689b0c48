"""A module as it was before a strategy's `setup`, to which it returns for a `setup` by fewer ranks in the same process.

A process that resumes a run has just built its module. A run that is rolled back has one that was split: its parts get
back the classes, attributes and hooks that they had then, with parameters that have room for a checkpoint's values.

Copied are containers that are attributes, one level deep, and buffers that no checkpoint has; no parameter.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .._compat.torch import _composable_state
from .replaced_parameters import Replacements

__all__ = ["ModuleBefore"]

_CONTAINERS = (dict, OrderedDict, list, set, deque)


class _Room(NamedTuple):
    """Shape and kind of a parameter that is not kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_trained: bool

    def make(self) -> nn.Parameter:
        # All values come from the checkpoint, also those of a parameter that had no memory yet.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        return nn.Parameter(torch.zeros(self.shape, dtype=self.dtype, device=device), self.is_trained)


class ModuleBefore:
    """A module's attributes and hooks before it is split.

    Args:
        module: whole.
        flag: flag of the strategy, for messages.
    """

    def __init__(self, module: nn.Module, flag: str) -> None:
        self._module, self._flag = module, flag
        self._parts: list[tuple[nn.Module, type, dict[str, Any], dict[str, Any]]] = []
        """Each part, its class, its attributes, and the content of those that are containers."""
        self._numbers: list[tuple[nn.Module, str, int]] = []
        """The number of each parameter, by the part that has it and its name there; tied ones have the same."""
        rooms: dict[int, tuple[int, _Room]] = {}
        self._buffers = [(buffer, buffer.clone()) for buffer in _not_in_checkpoints(module)]
        for part in module.modules():
            attributes = {key: value for key, value in vars(part).items() if key != "_parameters"}
            contents = {key: value.copy() for key, value in attributes.items() if type(value) in _CONTAINERS}
            self._parts.append((part, type(part), attributes, contents))
            for name, p in part._parameters.items():
                if p is not None:
                    room = _Room(p.shape, p.dtype, p.device, p.requires_grad)
                    number, _ = rooms.setdefault(id(p), (len(rooms), room))
                    self._numbers.append((part, name, number))
        self._rooms = [room for _, room in rooms.values()]

    def restore(self) -> None:
        """Gives the module all of that back; values of its parameters are undefined."""
        _register_shards(self._module)
        replacements = Replacements(self._module, self._flag)
        new: dict[int, nn.Parameter] = {}
        for part, name, number in self._numbers:
            present = part._parameters.get(name)
            if number not in new:
                room = self._rooms[number]
                is_whole = present is not None and not isinstance(present, DTensor) and present.shape == room.shape
                new[number] = present if present is not None and is_whole and not present.is_meta else room.make()
                new[number].requires_grad_(room.is_trained)
            if present is not None and present is not new[number]:
                replacements.replace(present, new[number])
            part._parameters[name] = new[number]
        for part, kind, attributes, contents in self._parts:
            own = vars(part)
            for key in own.keys() - attributes.keys() - {"_parameters"}:
                del own[key]
            for key, value in attributes.items():
                if key in contents:  # the same object: handles of hooks refer to it
                    value.clear()
                    (value.update if isinstance(value, dict | set) else value.extend)(contents[key])
                own[key] = value
            part.__class__ = kind
            _composable_state._module_state_mapping.pop(part, None)  # torch: where `fully_shard` looks
        replacements.update_references()
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)


def _not_in_checkpoints(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield buffer


def _register_shards(module: nn.Module) -> None:
    """Makes the parameters of units the shards again, if a forward or backward was interrupted."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # torch: FSDPState._fsdp_param_groups, FSDPParamGroup._to_sharded, which waits for nothing
            for group in part._get_fsdp_state()._fsdp_param_groups:
                group._to_sharded()
