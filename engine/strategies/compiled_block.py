"""A block whose forward is compiled by itself, inside of the hooks of the strategy that shards it.

Follows torchtitan's `apply_compile` (https://github.com/pytorch/torchtitan): each repeated block is a graph, which all
blocks of one class share; a block that computes activations again does so within its graph.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import tree_leaves

__all__ = ["CompiledBlock", "any_number_of_rows", "mark_rows"]

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
