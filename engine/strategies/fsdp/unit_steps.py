"""The steps of a module of FSDP2 units, and their wrappers while a strategy runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..._compat.torch import tree_leaves
from ...distributed.buckets import share_buffers
from ..contents import OF_MODULES, PLAIN, Contents, in_tuples
from ..layout import MeshStrategy
from ..parameter_hooks import call_before_use
from .comm import reshard
from .shard_checks import check_loss, explained
from .unit_order import UnitOrder

__all__ = ["ByHand", "UnitSteps", "called_parts", "hand_over_arguments", "optimizes_by_hand"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class UnitSteps(MeshStrategy):
    """Base of strategies on a mesh whose steps run a module of FSDP2 units.

    FSDP2 gathers parameters around `forward`, but Lightning calls the steps: each step is registered as a forward
    method. The order of its collectives is checked.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._is_in_step = False
        self._by_hand: ByHand | None = None
        self._order: UnitOrder | None = None
        self._synchronises = True
        self._whole: dict[int, list[str]] = {}

    def _wrap_steps(self, model: nn.Module, hooks_before: set[int]) -> None:
        """Wraps the steps of a module that was just sharded.

        Args:
            model: the model whose steps are replaced.
            hooks_before: the ids of the forward hooks that it had before it was sharded.
        """
        # Lightning calls these, not `forward`, whose hooks gather the parameters.
        for step in _STEPS:
            if not is_overridden(step, model, LightningModule):  # Lightning makes the same check to skip a loop
                continue
            method = getattr(model, step) if step in vars(model) else _of_class(model, step)
            method = self._track_manual_steps(method) if step == "training_step" else method
            setattr(model, step, self._mark_in_step(method))
            if isinstance(model, FSDPModule):
                register_fsdp_forward_method(model, step)
                setattr(model, step, self._note_collectives(getattr(model, step), step))
        # If a step calls `self(batch)`, these hooks would be nested, and gather everything a second time.
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in hooks.keys() - hooks_before:
                hooks[key] = functools.partial(self._unless_in_step, hooks[key])

    def _track_manual_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            with self._by_hand.step() if self._by_hand is not None else nullcontext():
                return step(*args, **kwargs)

        return tracked

    def _mark_in_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._is_in_step = True
            try:
                return step(*args, **kwargs)
            finally:
                self._is_in_step = False

        return marked

    def _note_collectives(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            order = None if self._is_in_step else self._order  # a step may call another one
            if order is not None:
                order.begin((name, self._synchronises))
            with explained(self.model, repr(self)):
                result = step(*args, **kwargs)
            if name == "training_step":
                check_loss(result.get("loss") if isinstance(result, dict) else result, repr(self))
            if order is not None and (name != "training_step" or self._by_hand is not None):
                order.begin(None)
            return result

        return noted

    def _unless_in_step(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        return None if self._is_in_step else hook(*arguments)

    def on_validation_start(self) -> None:
        """Called before each validation, the sanity check included, and before each test and prediction."""
        share_buffers(self.model)

    on_test_start = on_predict_start = on_validation_start

    def end_evaluation(self) -> None:
        """Frees gathered parameters, since no backward follows that would, so that hooks see the trained ones."""
        assert self.model is not None
        reshard(self.model)

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """Frees the parameters that are kept for backward, which gathers them again: hooks see and write their shards.

        What they wrote into a gathered copy would be lost, and a copy has no gradient.
        """
        assert self.model is not None
        reshard(self.model)
        yield


def _of_class(model: nn.Module, name: str) -> Callable[..., Any]:
    """Returns a method of `model` that is looked up in its class at each call: a callback may replace it there."""

    @functools.wraps(getattr(model, name))
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(model), name)(model, *args, **kwargs)

    return method


# Manual optimization under `fsdp`: `training_step` itself calls backward and the optimizers.
#
# FSDP2 expects one forward, then one backward, then the optimizer's step. Here each sub-module that the step calls,
# such as a generator and a discriminator, is a unit. Outside of a unit's forward, its parameters are the shards that
# the optimizers have. Parameters of the module itself are gathered for the whole step.


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


# A unit is handed the lists, dicts and objects that it is called with, not copies of them.
#
# FSDP2 passes the tensors among the arguments of a unit through an identity function, whose backward frees the unit's
# parameters and reduces their gradients. For a tensor in a list, dict or dataclass, it builds a new list, dict or
# dataclass, so that what the unit wrote into it (an auxiliary loss, a count) was lost. Here the container stays, and
# has the other tensor while the unit's forward runs. A tensor that the forward leaves in a container is an output as
# well: its backward may begin before that of the output, and gathers the unit's parameters. So is one that the forward
# leaves in an attribute of a module, or returns in an object of a class that torch does not look into.


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
            for tensor in (*_in_attributes(self._parts), *_in_objects(output)):
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


def _in_objects(output: Any) -> list[Tensor]:
    """Returns the tensors with a gradient in objects that a forward has returned."""
    if isinstance(output, Tensor) or all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(output)):
        return []
    return [tensor for tensor, _ in Contents((), (output,)).take_tensors() if tensor.grad_fn is not None]


def _is_copied(holder: Any) -> bool:
    """Whether torch copies a container: the collections of a user may have tensors that it does not see."""
    return isinstance(holder, (list, dict)) or dataclasses.is_dataclass(holder)


def _hidden(value: Any) -> Any:
    return _Kept(value) if _is_copied(value) else value


def _shown(value: Any) -> Any:
    return value.container if isinstance(value, _Kept) else value
