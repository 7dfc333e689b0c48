"""Activation checkpointing: blocks keep only their inputs for backward, which computes the rest again.

Uses torch's `checkpoint` without re-entrant autograd (https://docs.pytorch.org/docs/stable/checkpoint.html) around the
forward of each repeated block (`units.py`), inside of the hooks that gather its parameters. torch makes the second
forward draw the same random numbers under the same autocast. In addition, the second forward starts with the buffers,
attributes, contents of the arguments and random states of Python and NumPy that the first one started with, and with
what its code names: globals, attributes of classes and functions, variables of closures and contexts. It leaves them
unchanged. So a BatchNorm counts each batch once, a list of auxiliary losses gets each loss once, and the cache of a
decoder has each key once. An iterator can't be put back: a block that advances one is refused.

``"selective"`` keeps the outputs of matrix products, convolutions and attention as well (`_KEPT`), or of the operators
that the module's own method `kept_operators()` returns, and computes the rest again, which costs little. Random
operators are always computed again: later draws of the block depend on them.
"""

import functools
import random
import types
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # defines an operator
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from .contents import (
    Contents,
    attributes_of,
    begin_count,
    end_count,
    in_tuples,
    is_counted,
    put_attributes,
    put_values,
)
from .dp import DP
from .layout import DistributedStrategy
from .pipeline.reachable_state import Code, code_of, hooks_of
from .units import named_blocks

__all__ = ["RecomputeBlocks", "Recomputed", "blocks_to_recompute", "check_recompute", "kept_operators"]

_ATEN = torch.ops.aten
# torch 2.15 has an option for whether the module's hooks see the kept tensors; before, they never did.
_SEEN_BY_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_mm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Operators whose outputs ``"selective"`` keeps, unless the module names others."""
_Operator, _Operators = type(_ATEN.mm.default), type(_ATEN.mm)


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
    """The operators whose outputs ``"selective"`` keeps: `_KEPT`, or those of the module's `kept_operators()`.

    Raises:
        ValueError: the method returns something that is no operator, or an operator that draws random numbers.
    """
    method = getattr(module, "kept_operators", None)
    if method is None:
        return _KEPT
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
        if torch.Tag.nondeterministic_seeded in operator.tags and operator not in _KEPT:
            raise ValueError(
                f"{type(module).__name__}.kept_operators() has {operator}, which draws random numbers: to keep its"
                " output would change all later draws of a block. Leave it out."
            )
    return frozenset(kept)


def check_recompute(strategy: Strategy, options: Any, kind: str) -> str:
    """The kind of activation checkpointing, from the flag and the option of some strategies.

    Args:
        strategy: the one that trains; on one device it may be another than that of the flag.
        options: those of the flag's strategy.
        kind: the flag.

    Raises:
        ValueError: the flag and the option differ, or the strategy does not support this kind.
    """
    if getattr(options, "activation_checkpointing", False):
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
    if kind == "selective" and getattr(options, "schedule", None) == "zero-bubble":
        raise ValueError(
            "activation_checkpointing='selective' can't be done with schedule=zero-bubble, which runs backward through"
            " a block twice, while torch keeps what is selected for once: choose 'full', or another schedule."
        )
    return kind


class Recomputed:
    """Replaces a block's forward.

    Args:
        block: the block whose `forward` it replaces.
        kind: ``"full"`` or ``"selective"``.
        kept: operators whose outputs ``"selective"`` keeps.
    """

    is_on = True
    was_called = False
    _code: Code | None = None
    """The code of the block; None: it has not run yet."""
    _hooks: Sequence[Any] = ()
    """The hooks of sub-modules whose code this includes."""
    _written: frozenset[str] | None = None
    """The names of parameters that a forward has written, and `_OBJECTS`; None: it has not run yet."""
    block_name: str
    """The block's class before FSDP2 replaces it."""

    def __init__(self, block: nn.Module, kind: str, kept: frozenset[Any] = _KEPT) -> None:
        self.block_name = type(block).__name__
        self._block, self._own, self._kind = block, block.__dict__.get("forward"), kind
        self.original: Callable[..., Any] = block.forward
        functools.update_wrapper(self, self.original, updated=())
        selective = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, kept))
        self._options: dict[str, Any] = _SEEN_BY_HOOKS if kind == "selective" else {}
        self._contexts = selective if kind == "selective" else noop_context_fn
        # torch: the name by which the graphs of two runs, and of two processes, are the same in its cache.
        vars(selective)["cache_hash"] = str(sorted(map(str, kept)))
        self._options_in_graph: dict[str, Any] = {"context_fn": selective} if kind == "selective" else {}
        block.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's own forward, under `checkpoint` if a backward follows."""
        is_wanted = self.is_on and torch.is_grad_enabled()
        if is_wanted and torch.compiler.is_compiling():  # the trial run, which reads everything that the block writes
            return checkpoint(self.original, *args, use_reentrant=False, **self._options_in_graph, **kwargs)
        self.was_called = True
        if not is_wanted:
            return self.original(*args, **kwargs)
        values = (*args, *kwargs.values())
        inner = (part for part in self._block.modules() if part is not self._block)
        hooks = [hook for part in inner for table in hooks_of(part) for hook in table.values()]
        is_new = self._code is None or hooks != self._hooks
        if is_new:
            self._code, self._hooks = code_of(self._block), hooks
        own: Any = self._code
        functions, code = _functions(values), Code()
        for function in functions:
            code.follow_hook(function, self.block_name)
        contents = Contents(
            dict.fromkeys(
                part for module in (self._block, *values) if isinstance(module, nn.Module) for part in module.modules()
            ),
            (values, *functions, *hooks, *own.modules, *code.modules),
            [(table, place.name) for place, table in (*own.tables.items(), *code.tables.items())],
        )
        state = _State(self._block, contents, self._written)
        num_args, names = len(args), list(kwargs)

        def run(*values: Any) -> Any:
            return self.original(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        def contexts() -> tuple[Any, Any]:
            first, again = self._contexts()
            return first, _Together(state, again)

        # By position: torch does not look at keyword arguments to find the device of the random numbers.
        try:
            output = checkpoint(run, *values, use_reentrant=False, context_fn=contexts, **self._options)
        finally:
            problem = state.end()
        if contents.advanced:
            raise RuntimeError(
                f"activation_checkpointing={self._kind!r} is refused: the forward of {self.block_name} takes the next"
                f" value of an iterator ({contents.advanced}), and the repeated forward in backward would take the one"
                " after it. Count with a number (`self.calls += 1`), or leave activation_checkpointing out. This step"
                " has changed no weights."
            )
        if is_new:  # what the first forward has created, such as an attribute of its class
            self._code = code_of(self._block)
            tables = self._code.tables.items()
            contents.add_missing((table, place.name) for place, table in tables if place not in own.tables)
        if problem:
            raise RuntimeError(
                f"activation_checkpointing={self._kind!r} is refused: the forward of {self.block_name} writes in place"
                f" into {problem}, and the repeated forward in backward would start from the written values. Compute a"
                " new tensor in the block (`x = x + y` in place of `x += y`), or leave activation_checkpointing out."
                " This step has changed no weights."
            )
        self._written = state.written if self._written is None else self._written | state.written
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
        return types.MethodType, (getattr(self.original, "__func__", self.original), self._block)


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in kept and not _argument(operator, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _argument(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in operator._schema.arguments]  # torch: OpOverload._schema
    return args[names.index(name)] if name in names[: len(args)] else None


def _functions(arguments: tuple[Any, ...]) -> list[Any]:
    """Returns the functions and other callable objects among the arguments of a block, but for modules."""
    functions: list[Any] = []
    in_tuples(functions.append, arguments)
    return [f for f in functions if callable(f) and not isinstance(f, (nn.Module, type, Tensor))]


_OBJECTS = "a tensor in a list, dict or object"


class _State:
    """The state before the first forward of a block: contents, values of tensors, random states of Python and NumPy.

    Values are copied before a forward, and released after it unless it has written them.

    Args:
        block: the block.
        contents: all that the forward can reach.
        written: what earlier forwards have written, which has to be copied; None: everything is copied.
    """

    written: frozenset[str] = frozenset()
    """The names of parameters that the forward has written, and `_OBJECTS` if it has written one."""

    def __init__(self, block: nn.Module, contents: Contents, written: frozenset[str] | None) -> None:
        self._random, self._contents = _random_state(), contents
        tensors = [(tensor, _kind(holder)) for tensor, holder in contents.take_tensors()]
        self._versions = [(tensor, where, _version(tensor)) for tensor, where in tensors]
        self._values = {
            id(tensor): (tensor.detach().clone(), tensor.requires_grad)
            for tensor, where in tensors
            if where == "module" or (where == "object" and (written is None or _OBJECTS in written))
        }
        self._attributes = [(p, attributes_of(p)) for p in block.parameters()]
        self._counts = [(name, p, begin_count(p)) for name, p in block.named_parameters()]
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        self._copies = {
            name: p.detach().clone()
            for name, p, _ in self._counts
            if is_counted(p) and (written is None or name in written)
        }
        self._present: Any = None

    def end(self) -> str:
        """Called after the forward: releases copies of what it has not written.

        Returns:
            What it has written that has no copy, in words; otherwise "".
        """
        changed = {(id(tensor), where) for tensor, where, version in self._versions if _version(tensor) != version}
        holders = {where for _, where in changed}
        # Those of modules are released only together. A BatchNorm's kernel writes the statistics without a change of
        # their versions, but the version of its counter of batches changes.
        for tensor, where, _ in self._versions:
            if (id(tensor), where) not in changed and not (where == "module" and where in holders):
                self._values.pop(id(tensor), None)
        weights = {name: p for name, p, num in self._counts if end_count(p) != num}
        self._weights = [(p, self._copies[name]) for name, p in weights.items() if name in self._copies]
        self.written = frozenset((*weights, *([_OBJECTS] if "object" in holders else [])))
        problem = ""
        if "tuple" in holders:
            problem = "a tensor that it is called with"
        elif any(key not in self._values for key, _ in changed):
            problem = f"{_OBJECTS} that it has left alone before"
        elif lacking := [name for name in weights if name not in self._copies]:
            problem = f"its parameter {lacking[0]!r}"
        self._versions.clear()
        self._counts.clear()
        self._copies.clear()
        return problem

    def __enter__(self) -> None:
        """Restores the state that was recorded."""
        weights = [(parameter, parameter.detach().clone()) for parameter, _ in self._weights]
        attributes = [(p, attributes_of(p)) for p, _ in self._attributes]
        self._present = _random_state(), self._contents.present(), weights, attributes
        _set_random_state(self._random)
        self._contents.put({key: _fresh(*value) for key, value in self._values.items()})
        for parameter, value in self._weights:
            put_values(parameter, value)
        for parameter, own in self._attributes:
            put_attributes(parameter, own)

    def __exit__(self, *unused: object) -> None:
        """Restores the state before `__enter__`."""
        numbers, present, weights, attributes = self._present
        self._present = None
        present.put()
        _set_random_state(numbers)
        for parameter, value in weights:
            put_values(parameter, value)
        for parameter, own in attributes:
            put_attributes(parameter, own)


def _kind(holder: Any) -> str:
    return "module" if isinstance(holder, nn.Module) else "tuple" if holder is None else "object"


def _fresh(value: Tensor, requires_grad: bool) -> Tensor:
    """Returns a copy of a value for the repeated forward, which may write into it in place."""
    return value.clone().requires_grad_().clone() if requires_grad else value.clone()  # torch: not into a leaf


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


def _version(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; torch: Tensor._version, which inference tensors lack."""
    return None if tensor.is_inference() else tensor._version


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


# The flag `activation_checkpointing`: the module's blocks recompute their activations in backward.
#
# If a strategy wraps a block's forward itself (for compilation, or for a pipeline), it wraps the block for
# recomputation first; otherwise the blocks are wrapped when the strategy has set the module up.


class RecomputeBlocks(Callback):
    """Makes the blocks of a module recompute their activations in backward while it trains.

    Args:
        kind: ``"full"`` or ``"selective"``.
    """

    _kept_operators = _KEPT  # on the class: the callback is pickled for spawned workers, and operators can't be pickled

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._wrapped: dict[nn.Module, Recomputed] = {}
        self._is_checked = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the strategy the function that wraps a block."""
        if stage == "fit":
            if self.kind == "selective":
                self._kept_operators = kept_operators(pl_module)
            trainer.engine_strategy.recompute = self.wrap  # type: ignore[attr-defined]

    def wrap(self, block: nn.Module) -> None:
        """Makes a block recompute its activations."""
        self._wrapped[block] = Recomputed(block, self.kind, self._kept_operators)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps the blocks that the strategy has not wrapped."""
        if not trainer.engine_strategy.capabilities.recomputes_blocks:  # type: ignore[attr-defined]
            for block in blocks_to_recompute(pl_module):
                if block not in self._wrapped:
                    self.wrap(block)
        for recomputed in self._wrapped.values():
            recomputed.is_on = True
        rank_zero_info(
            f"activation_checkpointing={self.kind!r}: on this rank {len(self._wrapped)} blocks ({self._names()})"
            " compute their activations again in backward."
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resets the check, since the validation before training has called the blocks."""
        self._is_checked = bool(trainer.config.compile)  # type: ignore[attr-defined]  # which hides the calls
        for recomputed in self._wrapped.values():
            recomputed.was_called = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *unused: Any) -> None:
        """Checks after the first batch that some block recomputes its activations.

        Raises:
            RuntimeError: no block has run its forward.
        """
        if self._is_checked:
            return
        self._is_checked = True
        if self._wrapped and not any(recomputed.was_called for recomputed in self._wrapped.values()):
            raise RuntimeError(
                f"activation_checkpointing={self.kind!r} saves no memory: training_step has not called the forward"
                f" of any block ({self._names()}). Give {type(pl_module).__name__} a method shard_units() that returns"
                " the sub-modules it calls, or leave activation_checkpointing out."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the module."""
        self._detach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the module."""
        self._detach(trainer)

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(recomputed.block_name for recomputed in self._wrapped.values()))

    def _detach(self, trainer: Trainer) -> None:
        # Blocks inside of another wrapper are needed again by a later `fit`.
        self._wrapped = {block: wrapped for block, wrapped in self._wrapped.items() if not wrapped.detach()}
        vars(trainer.strategy).pop("recompute", None)
