"""A server's share of the parameters, and the optimizer that steps on it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Packing", "Shard", "dealt", "settings_of"]


def dealt(sizes: list[list[int]], num_servers: int) -> list[list[list[int]]]:
    """Deals whole parameters to servers, the largest first, each to the server that has least.

    Whole ones, since not every optimizer treats the elements of a parameter apart.

    Args:
        sizes: bytes of each parameter of each optimizer.
        num_servers: number of servers.

    Returns:
        For each server and each optimizer, the numbers of its parameters.
    """
    shares: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(num_servers)]
    loads = [0] * num_servers
    places = [(of, number) for of, parameters in enumerate(sizes) for number in range(len(parameters))]
    for of, number in sorted(places, key=lambda place: -sizes[place[0]][place[1]]):
        server = loads.index(min(loads))
        loads[server] += sizes[of][number]
        shares[server][of].append(number)
    return [[sorted(numbers) for numbers in share] for share in shares]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups as plain values: what schedulers change."""
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return all(isinstance(each, (int, float, str, type(None))) for each in (value if type(value) is tuple else [value]))


class Packing:
    """Tensors in one buffer per dtype, as they are sent.

    Args:
        tensors: whose shapes and dtypes those to be packed have.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._numbers: dict[torch.dtype, list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            self._numbers[tensor.dtype].append(number)

    def packed(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copies of the tensors in buffers on the CPU; zeros in place of None."""
        device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))

        def flat(number: int, dtype: torch.dtype) -> Tensor:
            tensor = tensors[number]
            if tensor is None:
                return torch.zeros(self._shapes[number].numel(), dtype=dtype, device=device)
            return tensor.detach().reshape(-1)

        return [
            torch.cat([flat(number, dtype) for number in numbers]).cpu() for dtype, numbers in self._numbers.items()
        ]

    def unpacked(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Views of the buffers, in the order of the tensors."""
        views: list[Tensor] = [torch.empty(0)] * len(self._shapes)
        for buffer, numbers in zip(buffers, self._numbers.values(), strict=True):
            sizes = [self._shapes[number].numel() for number in numbers]
            for number, part in zip(numbers, buffer.split(sizes), strict=True):
                views[number] = part.view(self._shapes[number])
        return views


class Shard:
    """Some of an optimizer's parameters, on the CPU, with an optimizer of the same kind and settings for them.

    Args:
        optimizer: of the module; its state of these parameters is taken over.
        parameters: those of the shard.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        self.packing = Packing(parameters)
        self.buffers = self.packing.packed(parameters)
        self.parameters = [view.requires_grad_() for view in self.packing.unpacked(self.buffers)]
        counterparts = dict(zip(parameters, self.parameters, strict=True))
        self._optimizer, self._group_numbers = _restricted(optimizer, counterparts)

    @torch.no_grad()
    def set_gradients(self, pushed: list[tuple[list[Tensor], list[bool]]]) -> float:
        """Makes the mean of what workers pushed the gradients.

        Args:
            pushed: of each push the buffers of gradients, and which parameters have one. One that only some have is
                zero for the others, as under ddp.

        Returns:
            The square of their 2-norm.
        """
        means = [torch.stack(each).mean(0) if len(each) > 1 else each[0] for each in _columns(pushed)]
        has_one = [any(each) for each in zip(*(present for _, present in pushed), strict=True)]
        total = 0.0
        for parameter, gradient, present in zip(self.parameters, self.packing.unpacked(means), has_one, strict=True):
            parameter.grad = gradient if present else None
            total += float(torch.linalg.vector_norm(gradient)) ** 2 if present else 0.0
        return total

    def clip_by_value(self, most: float) -> None:
        """Clamps each element of the gradients."""
        torch.nn.utils.clip_grad_value_(self.parameters, most)

    @torch.no_grad()
    def step(self, settings: list[dict[str, Any]], scale: float = 1.0) -> None:
        """One step of the optimizer.

        Args:
            settings: of the groups of the worker's optimizer, see `settings_of`.
            scale: what the gradients are multiplied by, to clip them.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        for group, number in zip(self._optimizer.param_groups, self._group_numbers, strict=True):
            for key, value in settings[number].items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters and optimizer state that this shard holds."""
        states = [value for each in self._optimizer.state.values() for value in each.values()]
        return sum(tensor.nbytes for tensor in (*self.buffers, *states) if isinstance(tensor, Tensor))

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter, as it is now."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in each.items()}
            for each in (self._optimizer.state.get(parameter, {}) for parameter in self.parameters)
        ]


def _columns(pushed: list[tuple[list[Tensor], list[bool]]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(buffers for buffers, _ in pushed), strict=True))


def _restricted(optimizer: Optimizer, counterparts: dict[Tensor, Tensor]) -> tuple[Optimizer, list[int]]:
    """An optimizer of the same class and settings for some of the parameters; and the numbers of its groups."""
    groups = [
        (number, {**group, "params": [counterparts[p] for p in group["params"] if p in counterparts]})
        for number, group in enumerate(optimizer.param_groups)
    ]
    groups = [(number, group) for number, group in groups if group["params"]]
    # Not by its constructor, of which nothing is known. torch: a scheduler puts a `step` of its own into the instance.
    new: Any = object.__new__(type(optimizer))
    new.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    new.param_groups = [{key: _own(value) for key, value in group.items()} for _, group in groups]
    new.state = defaultdict(dict)
    for given, own in counterparts.items():
        if given in optimizer.state:
            new.state[own] = {key: _own(value) for key, value in optimizer.state[given].items()}
    return new, [number for number, _ in groups]


def _own(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
