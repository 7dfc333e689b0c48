"""Finds the units of a module, which are sharded, checkpointed or moved together: its repeated blocks."""

import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import tree_leaves

__all__ = [
    "CompiledBlock",
    "any_number_of_rows",
    "block_lists",
    "check_inside",
    "mark_rows",
    "named_blocks",
    "shard_units",
    "untied",
]

_ROUTER = re.compile(r"(^|_)(router|routing|gate|gating)(_?\d*)$", re.IGNORECASE)


def shard_units(module: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one; everything else of `module` forms one last unit.

    A module may name them in a method ``shard_units()`` that returns some of its sub-modules. Otherwise they are the
    children of its longest `ModuleList` or `Sequential` whose children have one class and are no experts. A block that
    shares a parameter with a module outside of it belongs to the last unit, so that the two stay tied.

    Raises:
        ValueError: ``shard_units()`` returned an object that is no sub-module of `module`.
    """
    return untied(module, named_blocks(module))


def named_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of `module` as `shard_units` does, including those that share parameters.

    Raises:
        ValueError: as above.
    """
    if not callable(getattr(module, "shard_units", None)):
        return _repeated_blocks(module)[1]
    units = list(module.shard_units())  # type: ignore[operator]
    check_inside(module, units, "shard_units")
    return units


def untied(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns those `units` that share no parameter with the rest of `module`."""
    owners = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return [unit for unit in units if _owns_its_parameters(unit, owners)]


def check_inside(module: nn.Module, units: Iterable[nn.Module], method: str) -> None:
    """Checks that a method of `module` returned only sub-modules of it.

    Raises:
        ValueError: one is not.
    """
    inside = set(module.modules()) - {module}
    for unit in units:
        if unit not in inside:
            raise ValueError(
                f"{type(module).__name__}.{method}() returned {type(unit).__name__}, which is none of its own"
                " sub-modules: return modules that are found by `self.modules()`."
            )


def _repeated_blocks(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """The children of the longest `ModuleList` or `Sequential` of one class, and its name; empty if it has only one.

    Lists of experts are skipped: the data decides on each rank which experts are called.
    """
    return max(block_lists(module), key=lambda candidate: len(candidate[1]), default=("", []))


def block_lists(
    module: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential)
) -> list[tuple[str, list[nn.Module]]]:
    """Returns all such containers with more than one child, in the order of their registration."""
    candidates = (
        (name, list(submodule.values()) if isinstance(submodule, nn.ModuleDict) else list(submodule))  # type: ignore[call-overload]
        for name, submodule in module.named_modules()
        if isinstance(submodule, kinds)
    )
    return [
        (name, blocks)
        for name, blocks in candidates
        if len(blocks) > 1
        and len({type(child) for child in blocks}) == 1
        and all(next(child.parameters(), None) is not None and _is_called(child) for child in blocks)
        and (isinstance(module.get_submodule(name), nn.Sequential) or not _are_experts(module, name))
    ]


def _is_called(block: nn.Module) -> bool:
    """Whether a module has a forward, and is not only a container of the layers of a block."""
    is_container = isinstance(block, (nn.ModuleList, nn.ModuleDict))
    return not is_container or getattr(block.forward, "__func__", None) is not nn.Module.forward


def _are_experts(module: nn.Module, name: str) -> bool:
    """Whether the list `name` of `module` holds experts, judged by its name or by the name of a router beside it."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    beside = [child for child, part in owner.named_children() if not isinstance(part, nn.ModuleList)]
    beside += [parameter for parameter, _ in owner.named_parameters(recurse=False)]
    return "expert" in last.lower() or any(_ROUTER.search(sibling) for sibling in beside)


def _owns_its_parameters(unit: nn.Module, owners: Counter[int]) -> bool:
    """Whether no module outside of `unit` holds one of its parameters; `owners` counts the holders of each."""
    inside = Counter(id(p) for m in unit.modules() for p in m.parameters(recurse=False))
    return all(owners[key] == count for key, count in inside.items())


# A block whose forward is compiled by itself, inside of the hooks of the strategy that shards it.
#
# Follows torchtitan's `apply_compile` (https://github.com/pytorch/torchtitan): each repeated block is a graph, which
# all blocks of one class share; a block that computes activations again does so within its graph.

_may_vary: ContextVar[bool | None] = ContextVar("_may_vary", default=None)


@contextmanager
def any_number_of_rows(may_vary: bool) -> Iterator[None]:
    """Context of a step: whether its graphs are for any number of rows, the first dim of tensors.

    If another step calls it, that one decides.
    """
    outer = _may_vary.get()
    token = _may_vary.set(may_vary if outer is None else outer)
    try:
        yield
    finally:
        _may_vary.reset(token)


def mark_rows(arguments: Any) -> None:
    """Marks the rows of the tensors that a graph is called with, if their number varies: they need no graph of its own.

    A mark that comes with the first batch saves the graphs that dynamo would compile for it before it sees another.
    """
    if _may_vary.get():
        for value in tree_leaves(arguments):
            if isinstance(value, Tensor) and value.dim():
                torch._dynamo.maybe_mark_dynamic(value, 0)  # torch: documented, in a private module


class CompiledBlock:
    """Replaces a block's forward.

    Args:
        block: the block whose `forward` it replaces.
        compile: compiles a function.
    """

    is_hooked: bool
    """Whether hooks, which are not compiled, run around the block's forward."""
    as_written: Callable[[], AbstractContextManager[Any] | None] | None = None
    """Returns the context in which a call runs the block's own code; None if it runs the compiled code."""

    def __init__(self, block: nn.Module, compile: Callable[..., Any]) -> None:
        self._block, self._forward = block, block.forward
        # torch: Module._forward_pre_hooks and ._forward_hooks
        self.is_hooked = bool(block._forward_pre_hooks or block._forward_hooks)
        functools.update_wrapper(self, self._forward, updated=())  # whose attributes may have the names of these
        self._compiled = compile(self._forward)
        block.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's forward."""
        context = None if self.as_written is None else self.as_written()
        if context is None:
            mark_rows((args, kwargs))
            return self._compiled(*args, **kwargs)
        with context:
            return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled module gets its own forward back.
        if isinstance(self._forward, types.MethodType):
            return types.MethodType, (self._forward.__func__, self._block)
        return self._forward.__reduce__()  # type: ignore[return-value]  # of the wrapper for activation checkpointing
