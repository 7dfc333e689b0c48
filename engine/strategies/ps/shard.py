"""A server's share of the parameters, and the optimizer that steps on it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Packing", "Shard", "partition", "settings_of"]


def partition(sizes: list[list[int]], num_servers: int) -> list[list[list[int]]]:
    """Assigns whole parameters to servers, the largest first, each to the server with the fewest bytes.

    Parameters stay whole, since not every optimizer works element by element.

    Args:
        sizes: bytes of each parameter of each optimizer.
        num_servers: number of servers.

    Returns:
        For each server and each optimizer, the indices of its parameters.
    """
    shares: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(num_servers)]
    loads_bytes = [0] * num_servers
    parameters = [(optimizer, index) for optimizer, row in enumerate(sizes) for index in range(len(row))]
    for optimizer, index in sorted(parameters, key=lambda parameter: -sizes[parameter[0]][parameter[1]]):
        server = loads_bytes.index(min(loads_bytes))
        loads_bytes[server] += sizes[optimizer][index]
        shares[server][optimizer].append(index)
    return [[sorted(indices) for indices in share] for share in shares]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer's groups (learning rate, ...) as plain values; schedulers change them."""
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return all(isinstance(item, (int, float, str, type(None))) for item in (value if type(value) is tuple else [value]))


class Packing:
    """Packs tensors into one flat buffer per dtype, as they are sent.

    Args:
        tensors: any tensors of the shapes and dtypes that are to be packed.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._indices: dict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            self._indices[tensor.dtype].append(index)

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copies the tensors into 1-d buffers on the CPU; zeros in place of None."""
        device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))

        def flat(index: int, dtype: torch.dtype) -> Tensor:
            tensor = tensors[index]
            if tensor is None:
                return torch.zeros(self._shapes[index].numel(), dtype=dtype, device=device)
            return tensor.detach().reshape(-1)

        return [torch.cat([flat(index, dtype) for index in indices]).cpu() for dtype, indices in self._indices.items()]

    def unpack(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Returns views of the buffers, in the shapes and the order of the tensors."""
        views: list[Tensor] = [torch.empty(0)] * len(self._shapes)
        for buffer, indices in zip(buffers, self._indices.values(), strict=True):
            sizes = [self._shapes[index].numel() for index in indices]
            for index, view in zip(indices, buffer.split(sizes), strict=True):
                views[index] = view.view(self._shapes[index])
        return views


class Shard:
    """A server's copies of some of an optimizer's parameters, on the CPU, with an optimizer of the same class for them.

    Args:
        optimizer: optimizer of the module; its state of these parameters is copied.
        parameters: parameters of the shard, as the module has them.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        self.packing = Packing(parameters)
        self.buffers = self.packing.pack(parameters)
        self.parameters = [view.requires_grad_() for view in self.packing.unpack(self.buffers)]
        counterparts = dict(zip(parameters, self.parameters, strict=True))
        self._optimizer, self._group_indices = _optimizer_of(optimizer, counterparts)

    @torch.no_grad()
    def set_gradients(self, pushed: list[tuple[list[Tensor], list[bool]]]) -> float:
        """Makes the mean of the pushed gradients the gradients of the shard.

        Args:
            pushed: for each push the buffers of gradients, and whether each parameter has one. A gradient that only
                some pushes have is zero in the others, as under ddp.

        Returns:
            The squared 2-norm of the gradients.
        """
        means = [torch.stack(column).mean(0) if len(column) > 1 else column[0] for column in _columns(pushed)]
        has_gradient = [any(column) for column in zip(*(present for _, present in pushed), strict=True)]
        squared_norm = 0.0
        gradients = self.packing.unpack(means)
        for parameter, gradient, present in zip(self.parameters, gradients, has_gradient, strict=True):
            parameter.grad = gradient if present else None
            squared_norm += float(torch.linalg.vector_norm(gradient)) ** 2 if present else 0.0
        return squared_norm

    def clip_by_value(self, clip_value: float) -> None:
        """Clamps each element of the gradients to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(self.parameters, clip_value)

    @torch.no_grad()
    def step(self, settings: list[dict[str, Any]], scale: float = 1.0) -> None:
        """Does one step of the optimizer.

        Args:
            settings: settings of the groups of the worker's optimizer, see `settings_of`.
            scale: factor on the gradients, to clip them by their norm.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        for group, index in zip(self._optimizer.param_groups, self._group_indices, strict=True):
            for key, value in settings[index].items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters and optimizer state that this shard holds."""
        states = [value for values in self._optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in (*self.buffers, *states) if isinstance(tensor, Tensor))

    def state(self) -> list[dict[str, Any]]:
        """Returns a copy of the optimizer's state of each parameter."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
            for values in (self._optimizer.state.get(parameter, {}) for parameter in self.parameters)
        ]


def _columns(pushed: list[tuple[list[Tensor], list[bool]]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(buffers for buffers, _ in pushed), strict=True))


def _optimizer_of(optimizer: Optimizer, counterparts: dict[Tensor, Tensor]) -> tuple[Optimizer, list[int]]:
    """Returns an optimizer of the same class and state for the counterparts, and the indices of its groups."""
    groups = [
        (index, {**group, "params": [counterparts[p] for p in group["params"] if p in counterparts]})
        for index, group in enumerate(optimizer.param_groups)
    ]
    groups = [(index, group) for index, group in groups if group["params"]]
    # Without its constructor, whose arguments are not known. torch: a scheduler sets `step` on the instance.
    new: Any = object.__new__(type(optimizer))
    new.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    new.param_groups = [{key: _own(value) for key, value in group.items()} for _, group in groups]
    new.state = defaultdict(dict)
    for original, counterpart in counterparts.items():
        if original in optimizer.state:
            new.state[counterpart] = {key: _own(value) for key, value in optimizer.state[original].items()}
    return new, [index for index, _ in groups]


def _own(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
