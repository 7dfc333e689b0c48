"""Finds device reads in `training_step`; at each of them the host waits for all work that it has launched."""

import sys
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ReadWatch"]

_EVERY_BATCHES = 2000
_TENSOR = torch.Tensor
_READS = {
    _TENSOR.item: "item()",
    _TENSOR.tolist: "tolist()",
    _TENSOR.cpu: "cpu()",
    _TENSOR.numpy: "numpy()",
    _TENSOR.__bool__: "bool()",
    _TENSOR.__float__: "float()",
    _TENSOR.__int__: "int()",
}
_FOREIGN = ("torch.", "lightning.", "polyphase.", "torchmetrics.", "contextlib", "functools")


class ReadWatch:
    """Samples single calls of `training_step`; not on a CPU, where a read does not wait, nor in compiled code.

    Args:
        trainer: an engine.

    Attributes:
        may: whether calls are sampled at all: on an accelerator, and without compilation.
    """

    def __init__(self, trainer: Any) -> None:
        self.may = trainer.strategy.root_device.type != "cpu" and not trainer.flags.get("compile")
        self._next = 0
        self._mode: _Reads | None = None
        self._counts: dict[str, int] = {}

    def begin(self, number: int) -> None:
        """Starts to watch, if the `number`-th batch is one to sample; until `end`."""
        if self.may and number >= self._next and self._mode is None:
            self._next = number + _EVERY_BATCHES
            self._mode = _Reads()
            self._mode.__enter__()

    def end(self) -> None:
        """Stops watching."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._counts, self._mode = dict(self._mode.counts), None

    def take(self) -> dict[str, int]:
        """Returns the number of reads in the step sampled since the last call, by function and line of code."""
        counts, self._counts = self._counts, {}
        return counts


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READS.get(function)
        if name is not None and args and args[0].device.type != "cpu":
            self.counts[f"{name} at {_users_line()}"] += 1
        return function(*args, **(kwargs or {}))


def _users_line() -> str:
    """Returns the innermost line of the user's own code."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not f"{name}.".startswith(_FOREIGN):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a library"
