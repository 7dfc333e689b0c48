"""Manual optimization under `fsdp`: `training_step` itself calls backward and the optimizers.

FSDP2 expects one forward, then one backward, then the optimizer's step. Here each sub-module that the step calls, such
as a generator and a discriminator, is a unit. Outside of a unit's forward, its parameters are the shards that the
optimizers have. Parameters of the module itself are gathered for the whole step.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..before_use import call_before_use

__all__ = ["ByHand", "called_parts", "optimizes_by_hand"]


def optimizes_by_hand(module: nn.Module) -> bool:
    """Whether `module` uses manual optimization: its `training_step` itself calls backward and the optimizers."""
    return not getattr(module, "automatic_optimization", True)


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The sub-modules with parameters that a step can call: children, and members of containers without a forward."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_parts(child)
        elif next(child.parameters(), None) is not None:
            yield child


class ByHand:
    """Gathers and frees a module's parameters while its step calls forward, backward and optimizers in any order.

    Args:
        model: the model whose units and root are sharded by `fully_shard` and freed after their forward.
        optimizers: the optimizers that the step calls.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        assert isinstance(model, FSDPModule)
        self._root: Any = model
        self._units: list[Any] = [
            submodule for submodule in model.modules() if isinstance(submodule, FSDPModule) and submodule is not model
        ]
        self._own = [
            (prefix + name, submodule, name)
            for prefix, submodule in _outside(model)
            for name, parameter in submodule.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)  # parameters that are whole on every rank stay
        ]
        self._is_in_step = False
        self._handles: list[Any] = []
        for optimizer in optimizers:
            check: Any = functools.partial(call_before_use, self._check_gradients)
            self._handles.append(optimizer.register_step_pre_hook(check))
            self._handles.append(optimizer.register_step_post_hook(self._renew))
        model.set_reshard_after_backward(False, recurse=False)  # the step continues

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of `training_step`, in which the root's parameters are gathered.

        Raises:
            RuntimeError: the step wrote to a parameter of the root, and the change would be lost.
        """
        before = {name: (p, p._version) for name, p in self._own_parameters()}
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        written = [name for name, (parameter, version) in before.items() if parameter._version != version]
        if written:
            raise RuntimeError(
                f"`training_step` wrote to {', '.join(written)}, but each rank discards its copy after the step,"
                " and keeps its shard. Write to it in `on_train_batch_end`, or put it into a sub-module."
            )

    def begin_backward(self, loss: Tensor) -> None:
        """Called before a backward within the step; this backward then ends with the reduction of all gradients."""
        if loss.requires_grad:
            # torch: FSDPState._pre_backward, called by the outputs of a forward; the root's forward is not over yet.
            loss.register_hook(self._root._get_fsdp_state()._pre_backward)

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer uses its gradients.

        Raises:
            RuntimeError: no backward has given it gradients.
        """
        if not self._is_in_step:
            return  # between steps the root's parameters are the shards, which may have gradients
        left = [name for name, parameter in self._own_parameters() if parameter.grad is not None]
        if left:
            raise RuntimeError(
                f"the gradients of {', '.join(left)} were not averaged over the ranks: call"
                " `self.manual_backward(loss)` in place of `loss.backward()`, and assign none to `p.grad`."
            )
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if trained and all(p.grad is None for p in trained):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps without any gradient: each rank has shards of parameters, whose"
                " gradients come from `self.manual_backward(loss)`. `torch.autograd.grad` has none for them: choose"
                " strategy='ddp' for gradients that a step computes by it."
            )

    def _renew(self, *_: Any) -> None:
        """Gathers again after an optimizer's step, since the gathered weights are out of date."""
        for unit in (self._root, *self._units):
            unit.reshard()
        if self._is_in_step:
            self._root.unshard()

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns the root's parameters as they are now, gathered or not."""
        for path, owner, name in self._own:
            yield path, getattr(owner, name)


def _outside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """`module` and its sub-modules that are no units, each with the prefix of the names of its parameters."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside(child, f"{prefix}{name}.")
