"""A block whose forward is compiled by itself, inside of the hooks of the strategy that shards it.

Follows torchtitan's `apply_compile` (https://github.com/pytorch/torchtitan): each repeated block is a graph, which all
blocks of one class share; a block that computes activations again does so within its graph.
"""

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

__all__ = ["CompiledBlock"]


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
            return self._compiled(*args, **kwargs)
        with context:
            return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled module gets its own forward back.
        if isinstance(self._forward, types.MethodType):
            return types.MethodType, (self._forward.__func__, self._block)
        return self._forward.__reduce__()  # type: ignore[return-value]  # of the wrapper for activation checkpointing
