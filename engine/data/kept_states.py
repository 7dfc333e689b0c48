"""Keeps the states of a loader that is not a `DataLoader`, such as a node of torchdata, after each of its batches.

Such a loader's state may leave out the generators that its order is drawn from: torchdata's nodes make the iterator of
a sampler again, and skip what was read. So the states of the generators when the pass began are kept as well.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..checkpoint.rng import set_random_state
from .own_generators import OwnGenerators, set_state_here

__all__ = ["KeptStates"]


class KeptStates:
    """Iterates a loader with `state_dict`, and keeps its states after its latest batches.

    Lightning fetches one batch ahead if it does not know which batch is the last: the loader's own state is then
    after that batch, on which nothing was trained yet.

    Args:
        loader: the user's loader.
        epoch: returns the number of the current epoch.
        num_done: returns the number of batches of the epoch that were done before a pass.
        num_kept: returns the number of latest states that are kept.
        start: the states of the generators at the start of the pass that is resumed; None for a new one.
        is_over: the saved run had done the last batch of the first pass, which yields nothing.
    """

    def __init__(
        self,
        loader: Any,
        epoch: Callable[[], int],
        num_done: Callable[[], int],
        num_kept: Callable[[], int],
        start: dict[str, Any] | None = None,
        *,
        is_over: bool = False,
    ) -> None:
        self.loader = loader
        self._epoch, self._num_done, self._num_kept = epoch, num_done, num_kept
        self._states: dict[int, Any] = {}
        self._epoch_of_states = -1
        self._resumed, self._start, self._is_over = start, start, is_over

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self._is_over = False
            return iter(())
        resumed, self._resumed = self._resumed, None
        current = OwnGenerators(self.loader).state_here()
        self._start = resumed or current
        self._states.clear()
        self._epoch_of_states = self._epoch()
        if resumed is None:
            return self._batches(iter(self.loader), self._num_done())
        set_state_here(self.loader, resumed)
        batches = iter(self.loader)
        first = list(itertools.islice(batches, 1))  # some loaders draw their order with it
        set_random_state(current)
        return self._batches(itertools.chain(first, batches), self._num_done())

    def _batches(self, batches: Iterator[Any], done: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, done + 1):
            self._states[number] = copy.deepcopy(self.loader.state_dict())
            self._states.pop(number - self._num_kept(), None)
            yield batch

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns the state after a number of batches of an epoch, with those of generators at its start and now."""
        is_kept = epoch == self._epoch_of_states and batches in self._states
        return {
            "state": self._states[batches] if is_kept else self.loader.state_dict(),
            "pass_start": self._start,
            "generators_now": OwnGenerators(self.loader).states(),
        }
