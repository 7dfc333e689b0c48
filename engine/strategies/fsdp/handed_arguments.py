"""A unit is handed the lists, dicts and objects that it is called with, not copies of them.

FSDP2 passes the tensors among the arguments of a unit through an identity function, whose backward frees the unit's
parameters and reduces their gradients. For a tensor in a list, dict or dataclass, it builds a new list, dict or
dataclass, so that what the unit wrote into it (an auxiliary loss, a count) was lost. Here the container stays, and has
the other tensor while the unit's forward runs. A tensor that the forward leaves in a container is an output as well:
its backward may begin before that of the output, and gathers the unit's parameters. So is one that the forward leaves
in an attribute of a module.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..contents import OF_MODULES, PLAIN, Contents, in_tuples

__all__ = ["hand_over_arguments"]


class _Kept:
    """Hides a container from torch, which copies lists, dicts and dataclasses, but no other objects."""

    def __init__(self, container: Any) -> None:
        self.container = container


class _Own(torch.autograd.Function):
    """Identity whose result may be written in place; torch allows that for no output of a function with several."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.data  # the same memory, but no view

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hand_over_arguments(unit: nn.Module, *, is_freed: bool) -> None:
    """Makes a unit take its arguments as they are, from its next forward on.

    Args:
        unit: sharded by `fully_shard`.
        is_freed: whether its parameters are freed after its forward: those of the rest of the module are not, and there
            is no need to look through all of its attributes in each step.
    """
    assert isinstance(unit, FSDPModule)
    # torch: FSDPState._fsdp_param_groups, FSDPState._pre_backward, FSDPParamGroup._register_post_backward_hook and
    # post_forward.
    state: Any = unit._get_fsdp_state()
    for group in state._fsdp_param_groups:
        parts = list(unit.modules()) if is_freed else []
        arguments = _Arguments(state, parts, group._register_post_backward_hook, group.post_forward)
        group._register_post_backward_hook = arguments.begin
        group.post_forward = arguments.end


class _Arguments:
    """The containers among the arguments of the call of a unit that runs.

    Args:
        state: torch's state of the unit.
        parts: the unit and its sub-modules.
        register: torch's method that puts the identity function around tensors.
        post_forward: torch's method that ends a forward.
    """

    def __init__(
        self, state: Any, parts: list[nn.Module], register: Callable[..., Any], post_forward: Callable[..., Any]
    ) -> None:
        self._state, self._parts, self._register, self._torchs_end = state, parts, register, post_forward
        self._roots: tuple[Any, ...] = ()
        """The arguments of the call, if there are containers or objects among them."""
        self._before: dict[int, Tensor] = {}
        """The tensors with a gradient that these held before the call."""
        self._others: dict[int, tuple[Tensor, Tensor, int]] = {}
        """The tensors put into containers for the call, by id: the tensor, what it replaces, its number of writes."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before a forward; replaces torch's method."""
        roots = (*args, *kwargs.values())
        has_containers = torch.is_grad_enabled() and not all(isinstance(root, (Tensor, *PLAIN)) for root in roots)
        self._roots = roots if has_containers else ()
        if not self._roots:
            return self._register(args, kwargs)
        contents = Contents((), (roots,))
        held = [(tensor, holder) for tensor, holder in contents.take_tensors() if tensor.requires_grad]
        self._before = {id(tensor): tensor for tensor, _ in held}
        tensors = list({id(tensor): tensor for tensor, holder in held if _is_copied(holder)}.values())
        hidden = {name: in_tuples(_hidden, arg) for name, arg in kwargs.items()}
        (others, args), kwargs = self._register((tensors, in_tuples(_hidden, args)), hidden)
        own = [_Own.apply(other) for other in others]
        self._others = {id(new): (new, old, new._version) for new, old in zip(own, tensors, strict=True)}
        if tensors:
            contents.put({id(old): new for new, old in zip(own, tensors, strict=True)})
        return in_tuples(_shown, args), {name: in_tuples(_shown, arg) for name, arg in kwargs.items()}

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called after a forward; replaces torch's method."""
        if self._roots:
            contents, self._roots = Contents((), (self._roots,)), ()
            for new, old, version in self._others.values():
                if new._version != version:  # the forward has written it in place: so was the one before
                    old.copy_(new)
            for tensor, _ in contents.take_tensors():
                if tensor.requires_grad and id(tensor) not in self._others and id(tensor) not in self._before:
                    tensor.register_hook(self._gather)
            if self._others:
                contents.put({key: old for key, (_, old, _) in self._others.items()})
            self._before, self._others = {}, {}
        if torch.is_grad_enabled():
            for tensor in _in_attributes(self._parts):
                tensor.register_hook(self._gather)
        return self._torchs_end(module, args, output)

    def _gather(self, gradient: Tensor) -> Tensor:
        return self._state._pre_backward(gradient)


def _in_attributes(parts: list[nn.Module]) -> Iterator[Tensor]:
    """Returns the tensors with a gradient that are attributes of modules, or in a list or dict that is."""
    for part in parts:
        for name, value in vars(part).items():
            held: Any = (value,)
            if isinstance(value, (list, dict)) and name not in OF_MODULES:
                held = value.values() if isinstance(value, dict) else value
            yield from (item for item in held if isinstance(item, Tensor) and item.grad_fn is not None)


def _is_copied(holder: Any) -> bool:
    """Whether torch copies a container: the collections of a user may have tensors that it does not see."""
    return isinstance(holder, (list, dict)) or dataclasses.is_dataclass(holder)


def _hidden(value: Any) -> Any:
    return _Kept(value) if _is_copied(value) else value


def _shown(value: Any) -> Any:
    return value.container if isinstance(value, _Kept) else value
