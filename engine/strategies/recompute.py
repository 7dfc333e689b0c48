"""Activation checkpointing: blocks keep their inputs for backward, and compute the rest again there.

torch's own without re-entrant autograd (https://docs.pytorch.org/docs/stable/checkpoint.html), around the forward of
each repeated block (`units.py`), inside of the hooks that gather its parameters. torch has the second forward draw the
same random numbers under the same autocast. What it leaves to its users, and is done here: the second forward finds
buffers, attributes and the random numbers of Python and NumPy as the first one did, and leaves no trace. A BatchNorm
counts each batch once, a list of auxiliary losses has each of them once.

``"selective"`` keeps the outputs of matrix products, convolutions and attention as well (`KEPT`), or of the operators
that the module's own method `kept_operators()` returns, and computes the rest again, which costs little. What draws
random numbers is always computed again: later draws of the block depend on it.
"""

import collections
import copy
import functools
import random
import types
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from .dp import DP
from .layout import DistributedStrategy
from .units import named_blocks

__all__ = ["KEPT", "Recomputed", "blocks_to_recompute", "check_recompute", "kept_operators"]

_ATEN = torch.ops.aten
# torch 2.15 asks whether hooks of the module's own see what is kept; before, they never did.
_SEEN_BY_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operators whose outputs ``"selective"`` keeps, unless the module says which."""
_Operator, _Operators = type(_ATEN.mm.default), type(_ATEN.mm)

# Of every module; parameters are not changed by a forward, and FSDP swaps them in and out of its modules.
_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


def blocks_to_recompute(module: nn.Module) -> list[nn.Module]:
    """The blocks of `module`, each once.

    Raises:
        ValueError: it has none.
    """
    blocks = list(dict.fromkeys(named_blocks(module)))
    if not blocks:
        raise ValueError(
            f"activation_checkpointing needs repeated blocks, and {type(module).__name__} has no ModuleList or"
            " Sequential of one class: give it a method shard_units() that returns the sub-modules whose activations"
            " are to be computed again, or leave activation_checkpointing out."
        )
    return blocks


def kept_operators(module: nn.Module) -> frozenset[Any]:
    """The operators whose outputs ``"selective"`` keeps: `KEPT`, or those of the module's `kept_operators()`.

    Raises:
        ValueError: the method returns what is no operator, or draws random numbers.
    """
    method = getattr(module, "kept_operators", None)
    if method is None:
        return KEPT
    kept: set[Any] = set()
    for operator in method():
        if isinstance(operator, _Operators):  # of all signatures, as torch.ops.aten.mm
            kept.update(getattr(operator, name) for name in operator.overloads())
        elif isinstance(operator, _Operator):
            kept.add(operator)
        else:
            raise ValueError(
                f"{type(module).__name__}.kept_operators() must return operators such as torch.ops.aten.mm, but there"
                f" is {operator!r} among them."
            )
    for operator in kept:
        if torch.Tag.nondeterministic_seeded in operator.tags and operator not in KEPT:
            raise ValueError(
                f"{type(module).__name__}.kept_operators() has {operator}, which draws random numbers: to keep its"
                " output would change all later draws of a block. Leave it out."
            )
    return frozenset(kept)


def check_recompute(strategy: Strategy, kind: str, *, compiles: bool) -> str:
    """The kind of activation checkpointing, by the flag and the option of some strategies.

    Raises:
        ValueError: the two differ, or the strategy can't do it.
    """
    if getattr(getattr(strategy, "options", None), "activation_checkpointing", False):
        if kind == "selective":
            raise ValueError(
                "activation_checkpointing='selective' contradicts the strategy's option activation_checkpointing=true,"
                " which is 'full': leave the option out."
            )
        kind = "full"
    if kind == "none":
        return kind
    if isinstance(strategy, DP):
        raise ValueError(
            "strategy 'dp' can't do activation_checkpointing: copies of a block would all run the forward of the first"
            " one. Leave it out, or choose strategy 'ddp'."
        )
    if not isinstance(strategy, (DistributedStrategy, SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            f"activation_checkpointing can't be done under Lightning's own {type(strategy).__name__}: give that one an"
            " argument of its own, or choose a strategy by a flag such as 'fsdp'."
        )
    if kind == "selective" and compiles:
        raise ValueError(
            "activation_checkpointing='selective' can't be done with compile, whose graphs torch can't check for"
            " operators that write over what is kept, and which computes cheap operators again by itself: choose"
            " 'full', or leave one of them out."
        )
    if kind == "selective" and getattr(strategy, "options", None) and _splits_backward(strategy):
        raise ValueError(
            "activation_checkpointing='selective' can't be done with schedule=zero-bubble, which runs backward through"
            " a block twice, while torch keeps what is selected for once: choose 'full', or another schedule."
        )
    return kind


def _splits_backward(strategy: Any) -> bool:
    return getattr(strategy.options, "schedule", None) == "zero-bubble"


class Recomputed:
    """Replaces a block's forward.

    Args:
        block: whose `forward` it becomes.
        kind: ``"full"`` or ``"selective"``.
        kept: operators whose outputs ``"selective"`` keeps.
    """

    is_on = True
    was_called = False
    block_name: str
    """The block's class, before FSDP2 makes another one of it."""

    def __init__(self, block: nn.Module, kind: str, kept: frozenset[Any] = KEPT) -> None:
        self.block_name = type(block).__name__
        self._block, self._own = block, block.__dict__.get("forward")
        self._forward: Callable[..., Any] = block.forward
        functools.update_wrapper(self, self._forward)
        selective = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, kept))
        self._options: dict[str, Any] = _SEEN_BY_HOOKS if kind == "selective" else {}
        self._contexts = selective if kind == "selective" else noop_context_fn
        block.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's own forward, under `checkpoint` where there is to be a backward."""
        is_wanted = self.is_on and torch.is_grad_enabled()
        if is_wanted and torch.compiler.is_compiling():  # which makes values of all that the block writes
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        self.was_called = True
        if not is_wanted:
            return self._forward(*args, **kwargs)
        state = _State(self._block)
        num_args, names = len(args), list(kwargs)

        def run(*values: Any) -> Any:
            return self._forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        def contexts() -> tuple[Any, Any]:
            first, again = self._contexts()
            return first, _Together(state, again)

        # By position: of what is named, torch would not see on which device random numbers are drawn.
        output = checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts, **self._options)
        state.forget_unchanged()
        return output

    def detach(self) -> bool:
        """Restores the block's own forward; returns False if another wrapper is around this one."""
        self.is_on = False
        if self._block.__dict__.get("forward") is not self:
            return False
        del self._block.__dict__["forward"]
        if self._own is not None:
            self._block.__dict__["forward"] = self._own
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # A module that is copied or pickled in mid-run has its own forward back.
        return types.MethodType, (getattr(self._forward, "__func__", self._forward), self._block)


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in kept and not _argument(operator, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _argument(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in operator._schema.arguments]  # torch: OpOverload._schema
    return args[names.index(name)] if name in names[: len(args)] else None


class _State:
    """Buffers and attributes of a block's modules, and random numbers that torch does not draw, as they are now."""

    def __init__(self, block: nn.Module) -> None:
        self._random = _random_state()
        self._parts = [_PartState(part) for part in block.modules()]
        self._present: tuple[Any, list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]] = (None, [])

    def forget_unchanged(self) -> None:
        """Called after a forward: releases the copies of tensors that it has not written to."""
        for part in self._parts:
            part.forget_unchanged()

    def __enter__(self) -> None:
        """Restores the state that was recorded."""
        parts = [(part.part, _attributes(part.part), dict(part.part._buffers)) for part in self._parts]
        self._present = _random_state(), parts
        _set_random_state(self._random)
        for part in self._parts:
            part.put()

    def __exit__(self, *unused: object) -> None:
        """Restores the state before `__enter__`."""
        numbers, parts = self._present
        for part, attributes, buffers in parts:
            _put(part, attributes, buffers)
        _set_random_state(numbers)
        self._present = (None, [])


class _Together:
    """Two contexts, the second within the first; may be entered several times, one after the other."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._inner.__exit__(*raised)
        self._outer.__exit__(*raised)


class _PartState:
    """The same of one module: its containers to any depth, and of tensors that are its own the values."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self._attributes = {name: _copied(value) for name, value in _attributes(part).items()}
        self._buffers = dict(part._buffers)
        own = (*self._attributes.values(), *self._buffers.values())
        tensors = [value for value in own if isinstance(value, Tensor) and not value.requires_grad]
        self._versions = [(tensor, _version(tensor)) for tensor in tensors]
        self._values = {id(tensor): tensor.detach().clone() for tensor in tensors}

    def forget_unchanged(self) -> None:
        # Of all together: a BatchNorm's kernel writes its statistics without telling, and its counter as any tensor.
        if all(_version(tensor) == version for tensor, version in self._versions):
            self._values.clear()

    def put(self) -> None:
        """Gives the module what it had, to be written into."""
        attributes = {name: self._fresh(value) for name, value in self._attributes.items()}
        _put(self.part, attributes, {name: self._fresh(tensor) for name, tensor in self._buffers.items()})

    def _fresh(self, value: Any) -> Any:
        return self._values[id(value)].clone() if id(value) in self._values else _copied(value)


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if name not in _OF_MODULES}


def _put(part: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    present = part.__dict__
    for name in [name for name in present if name not in attributes and name not in _OF_MODULES]:
        del present[name]
    present.update(attributes)
    part._buffers.clear()
    part._buffers.update(buffers)


def _copied(value: Any) -> Any:
    """Returns a copy of a container, to any depth, or of a random generator; any other object itself."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) not in _CONTAINERS:
        return value
    copied = copy.copy(value)
    if isinstance(copied, dict):
        copied.update({key: _copied(item) for key, item in value.items()})
    elif not isinstance(copied, set):
        copied.clear()
        copied.extend(_copied(item) for item in value)
    return copied


def _version(tensor: Tensor) -> int | None:
    """How often it was written into; torch: Tensor._version, which tensors of inference mode lack."""
    return None if tensor.is_inference() else tensor._version


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
