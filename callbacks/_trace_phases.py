"""Names the parts of a step in a trace of torch.profiler: forward, backward, optimizer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.profiler import record_function

from polyphase.engine.strategies import capabilities_of

__all__ = ["OptimizerRange", "named_steps"]


@contextmanager
def named_steps(strategy: Any) -> Iterator[None]:
    """Marks each forward and backward of `strategy` as a range in the trace."""
    # A pipeline schedule runs both in one call.
    forward = "forward and backward" if capabilities_of(strategy).runs_own_schedule else "forward"
    names = {"training_step": forward, "backward": "backward"}
    before = {attribute: vars(strategy)[attribute] for attribute in names if attribute in vars(strategy)}
    for attribute, name in names.items():
        setattr(strategy, attribute, _named(getattr(strategy, attribute), name))
    try:
        yield
    finally:
        for attribute in names:
            vars(strategy).pop(attribute, None)  # makes the class's method visible again
        vars(strategy).update(before)


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return method(*args, **kwargs)

    return named


class OptimizerRange:
    """The trace range "optimizer", from the end of backward to the end of `Optimizer.step`."""

    def __init__(self) -> None:
        self._open: Any = None
        self._hooks = ExitStack()

    def begin(self, optimizer: Any) -> None:
        """Begins the range; called after backward."""
        self.end()
        handle = optimizer.register_step_post_hook(lambda *_: self.end())
        self._hooks.callback(handle.remove)
        self._open = record_function("optimizer")
        self._open.__enter__()

    def end(self) -> None:
        """Ends the range, if one is open."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
        self._hooks.close()
