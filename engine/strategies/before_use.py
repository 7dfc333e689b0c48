"""Calls a function when an optimizer is about to use its gradients, from a hook before its step."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["call_before_use"]


def call_before_use(
    function: Callable[[Optimizer], None], optimizer: Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Calls `function` at once, or after the closure that computes the gradients, which Lightning always gives.

    Args:
        function: called with the optimizer.
        optimizer: the optimizer, with which torch has called a hook before its step.
        args: what the hook was called with: the optimizer, and maybe the closure.
        kwargs: likewise.

    Returns:
        What the hook returns: the new `args` and `kwargs`; None if they stay.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        function(optimizer)
        return None
    closure = functools.partial(_close_then, function, optimizer, closure)
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _close_then(function: Callable[[Optimizer], None], optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    result = closure()
    function(optimizer)
    return result
