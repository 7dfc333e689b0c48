"""The calls of torch that a step makes outside of units, counted: by its number, all stages know which value is meant.

Every stage runs the same step, and skips or runs the same units, so it makes the same calls in the same order. A call
counts if it returns a tensor, and so does a unit's. Whether two stages mean the same is checked by the form: the name
of what was called, the shape and the dtype.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Calls", "Form", "Key"]

Key = tuple[int, int]
"""The number of a call, from 1, and that of the tensor in what it returned."""


class Form(NamedTuple):
    """A description of a value, by which several stages recognise it as the same."""

    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """In words."""
        return f"what {self.call} returned, {list(self.shape)} of {self.dtype},"


class Calls:
    """The calls of one run of the step, counted, with the keys of their results."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: dict[Key, Tensor] = {}
        """Results by key: those that were asked for; in a trial run, those without content."""
        self.forms: dict[Key, Form] = {}
        """The forms of all values of a trial run, by key."""
        self._wanted: frozenset[int] = frozenset()
        self._tries = False

    def begin(self, wanted: Iterable[Key], *, tries: bool) -> None:
        """Counts from 1 again.

        Args:
            wanted: what is kept.
            tries: whether this is a trial run.
        """
        self.count, self._tries = 0, tries
        self._wanted = frozenset(number for number, _ in wanted)
        self.end()
        self.forms.clear()

    def end(self) -> None:
        """Lets go of the values."""
        self.kept.clear()

    def note(self, name: str, tensors: Collection[Tensor]) -> None:
        """Counts a call that returned these."""
        if not tensors:
            return
        self.count += 1
        if not self._tries and self.count not in self._wanted:
            return
        for index, tensor in enumerate(tensors):
            key = self.count, index
            if not self._tries or tensor.is_meta:
                self.kept[key] = tensor
            if self._tries:
                self.forms[key] = Form(name, tuple(tensor.shape), tensor.dtype)
                if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                    tensor.__dict__.setdefault("key_in_step", key)

    def key_of(self, tensor: Tensor) -> Key | None:
        """The key of a value without content, in a trial run; None if it has none."""
        key: Any = tensor.__dict__.get("key_in_step")
        return key if key is not None and self.kept.get(key) is tensor else None
