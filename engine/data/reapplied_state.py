"""Detects a data set that applies a loaded state again in the epochs after the resumed one."""

import copy
from typing import Any

from .drawing import is_same_state

__all__ = ["ReappliedState"]


class ReappliedState:
    """Detects a data set that applies a loaded state in every later pass, as some of Hugging Face do.

    After the resumed epoch, the next pass of such a data set begins where the resumed one began, or is empty. Other
    data sets begin where the last pass ended.

    Args:
        dataset: before the state is loaded.
        begins_epoch: whether the state is that of the end of an epoch.
    """

    def __init__(self, dataset: Any, *, begins_epoch: bool) -> None:
        self._dataset = dataset
        self._initial = copy.deepcopy(dataset.state_dict())
        self._first: Any = None
        self._has_first = False
        self._begins_epoch = begins_epoch

    @property
    def is_due(self) -> bool:
        """Whether the next pass is the first one after the resumed epoch."""
        return self._begins_epoch or self._has_first

    def note_batch(self) -> None:
        """Called after each batch of the resumed epoch, and at its end."""
        if not self._has_first:
            self._first, self._has_first = copy.deepcopy(self._dataset.state_dict()), True

    def is_applied(self, first: list[Any]) -> bool:
        """Whether a pass began with the loaded state.

        Args:
            first: the first batch of the pass in a list; an empty one if it has none.
        """
        return not first or (self._has_first and is_same_state(self._dataset.state_dict(), self._first))

    def clear(self) -> None:
        """Sets the data set back to its start."""
        self._dataset.load_state_dict(self._initial)
