"""Counts the calls of torch that a step makes outside of units: the number of a call names its result on all stages.

Every stage runs the same step, and skips or runs the same units, so it makes the same calls in the same order. Calls
that return a tensor are counted, those of units too. A signature (the name of the called function, shape and dtype)
checks that two stages mean the same value.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Calls", "Key", "ValueSignature"]

Key = tuple[int, int]
"""The number of a call, from 1, and the index of a tensor in its result."""


class ValueSignature(NamedTuple):
    """The call that made a value, its shape and its dtype: equal on all stages for the same value."""

    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """Describes the value in words."""
        return f"what {self.call} returned, {list(self.shape)} of {self.dtype},"


class Calls:
    """Counts the calls of one run of the step, and keeps some of their results."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: dict[Key, Tensor] = {}
        """Results by key: those that `begin` was asked to keep; in a trial run, those without content."""
        self.signatures: dict[Key, ValueSignature] = {}
        """The signatures of all values of a trial run, by key."""
        self._kept_calls: frozenset[int] = frozenset()
        self._is_trial = False

    def begin(self, kept_keys: Iterable[Key], *, is_trial: bool) -> None:
        """Starts to count from 1.

        Args:
            kept_keys: keys of the results to keep.
            is_trial: whether this is a trial run.
        """
        self.count, self._is_trial = 0, is_trial
        self._kept_calls = frozenset(number for number, _ in kept_keys)
        self.end()
        self.signatures.clear()

    def end(self) -> None:
        """Releases the results."""
        self.kept.clear()

    def note(self, name: str, tensors: Collection[Tensor]) -> None:
        """Counts a call, if it returned tensors.

        Args:
            name: name of the called function or unit.
            tensors: the tensors that it returned.
        """
        if not tensors:
            return
        self.count += 1
        if not self._is_trial and self.count not in self._kept_calls:
            return
        for index, tensor in enumerate(tensors):
            key = self.count, index
            if not self._is_trial or tensor.is_meta:
                self.kept[key] = tensor
            if self._is_trial:
                self.signatures[key] = ValueSignature(name, tuple(tensor.shape), tensor.dtype)
                if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                    tensor.__dict__.setdefault("key_in_step", key)

    def key_of(self, tensor: Tensor) -> Key | None:
        """Returns the key of a value without content, in a trial run; None if no counted call returned it."""
        key: Any = tensor.__dict__.get("key_in_step")
        return key if key is not None and self.kept.get(key) is tensor else None
