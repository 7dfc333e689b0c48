"""Finds reads of the device in `training_step`, each of which has the host wait for all that it has launched."""

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
    """Watches one `training_step` of many; none on a CPU, where a read waits for nothing, nor in compiled code.

    Args:
        trainer: an engine.
    """

    def __init__(self, trainer: Any) -> None:
        self._may = trainer.strategy.root_device.type != "cpu" and not trainer.flags.get("compile")
        self._next = 0
        self._mode: _Reads | None = None
        self._found: dict[str, int] = {}

    def begin(self, number: int) -> None:
        """Watches from here to `end`, where the `number`-th batch is due."""
        if self._may and number >= self._next and self._mode is None:
            self._next = number + _EVERY_BATCHES
            self._mode = _Reads()
            self._mode.__enter__()

    def end(self) -> None:
        """Watches no more."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._found, self._mode = dict(self._mode.found), None

    def take(self) -> dict[str, int]:
        """Returns the reads of the step that was watched since the last call, by what and where."""
        found, self._found = self._found, {}
        return found


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READS.get(function)
        if name is not None and args and args[0].device.type != "cpu":
            self.found[f"{name} at {_users_line()}"] += 1
        return function(*args, **(kwargs or {}))


def _users_line() -> str:
    """The innermost line that is the user's own."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not f"{name}.".startswith(_FOREIGN):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a library"
