"""Activation checkpointing: blocks keep only their inputs for backward, which computes the rest again.

Uses torch's `checkpoint` without re-entrant autograd (https://docs.pytorch.org/docs/stable/checkpoint.html) around the
forward of each repeated block (`units.py`), inside of the hooks that gather its parameters. torch makes the second
forward draw the same random numbers under the same autocast. In addition, the second forward starts with the buffers,
attributes and random states of Python and NumPy that the first one started with, and leaves them unchanged. So a
BatchNorm counts each batch once, and a list of auxiliary losses gets each loss once.

``"selective"`` keeps the outputs of matrix products, convolutions and attention as well (`KEPT`), or of the operators
that the module's own method `kept_operators()` returns, and computes the rest again, which costs little. Random
operators are always computed again: later draws of the block depend on them.
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
# torch 2.15 has an option for whether the module's hooks see the kept tensors; before, they never did.
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
"""Operators whose outputs ``"selective"`` keeps, unless the module names others."""
_Operator, _Operators = type(_ATEN.mm.default), type(_ATEN.mm)

# Attributes of every module; a forward does not change parameters, and FSDP swaps them in and out of its modules.
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
        ValueError: the method returns something that is no operator, or an operator that draws random numbers.
    """
    method = getattr(module, "kept_operators", None)
    if method is None:
        return KEPT
    kept: set[Any] = set()
    for operator in method():
        if isinstance(operator, _Operators):  # with all overloads, such as torch.ops.aten.mm
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
    """The kind of activation checkpointing, from the flag and the option of some strategies.

    Raises:
        ValueError: the flag and the option differ, or the strategy does not support this kind.
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
        block: the block whose `forward` it replaces.
        kind: ``"full"`` or ``"selective"``.
        kept: operators whose outputs ``"selective"`` keeps.
    """

    is_on = True
    was_called = False
    block_name: str
    """The block's class before FSDP2 replaces it."""

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
        """Runs the block's own forward, under `checkpoint` if a backward follows."""
        is_wanted = self.is_on and torch.is_grad_enabled()
        if is_wanted and torch.compiler.is_compiling():  # the trial run, which reads everything that the block writes
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

        # By position: torch does not look at keyword arguments to find the device of the random numbers.
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
        # A copied or pickled module gets its own forward back.
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
    """The current buffers and attributes of a block's modules, and the random states of Python and NumPy."""

    def __init__(self, block: nn.Module) -> None:
        self._random = _random_state()
        self._parts = [_PartState(submodule) for submodule in block.modules()]
        self._present: tuple[Any, list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]] = (None, [])

    def forget_unchanged(self) -> None:
        """Called after a forward: releases the copies of tensors that it has not written to."""
        for part_state in self._parts:
            part_state.forget_unchanged()

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
    """The state of one module: its containers to any depth, and the values of its own tensors."""

    def __init__(self, submodule: nn.Module) -> None:
        self.part = submodule
        self._attributes = {name: _copied(value) for name, value in _attributes(submodule).items()}
        self._buffers = dict(submodule._buffers)
        values = (*self._attributes.values(), *self._buffers.values())
        tensors = [value for value in values if isinstance(value, Tensor) and not value.requires_grad]
        self._versions = [(tensor, _version(tensor)) for tensor in tensors]
        self._values = {id(tensor): tensor.detach().clone() for tensor in tensors}

    def forget_unchanged(self) -> None:
        # The copies are released only together. A BatchNorm's kernel writes the statistics without a change of their
        # versions, but the version of its counter of batches changes.
        if all(_version(tensor) == version for tensor, version in self._versions):
            self._values.clear()

    def put(self) -> None:
        """Puts the recorded values into the module, as copies."""
        attributes = {name: self._fresh(value) for name, value in self._attributes.items()}
        _put(self.part, attributes, {name: self._fresh(tensor) for name, tensor in self._buffers.items()})

    def _fresh(self, value: Any) -> Any:
        return self._values[id(value)].clone() if id(value) in self._values else _copied(value)


def _attributes(submodule: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in submodule.__dict__.items() if name not in _OF_MODULES}


def _put(submodule: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    present = submodule.__dict__
    for name in [name for name in present if name not in attributes and name not in _OF_MODULES]:
        del present[name]
    present.update(attributes)
    submodule._buffers.clear()
    submodule._buffers.update(buffers)


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
    """The number of writes to a tensor; torch: Tensor._version, which inference tensors lack."""
    return None if tensor.is_inference() else tensor._version


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
