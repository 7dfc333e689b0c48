"""The random draws of one pass over a stream that this process reads itself; a resumed pass repeats them."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from .drawing import is_same_state
from .own_generators import OwnGenerators, set_state_here
from .stream_loader import is_stateful

__all__ = ["PassDraws"]


class PassDraws:
    """Follows the random generators through one pass over a stream in this process.

    Args:
        dataset: the stream.
        resumed: the `state` of the pass that is resumed; None for a new one.
    """

    def __init__(self, dataset: Any, resumed: dict[str, Any] | None) -> None:
        self._dataset = dataset
        self._own = OwnGenerators(dataset)
        self._resumed = resumed if resumed is not None and resumed["start"] is not None else None
        self._start = self._own.state_here() if self._resumed is None else self._resumed["start"]
        # A stream without a state is read again: it may draw its order when the iterator is made, before a fetch.
        self._has_drawn = self._resumed is not None or not is_stateful(dataset)
        self._draws_between = self._resumed is not None and self._resumed["draws_on"]
        self._num_fetched = 0
        self._state: dict[str, Any] | None = resumed

    def begin(self) -> bool:
        """Called before the iterator is made; returns whether it resumes a pass."""
        if self._resumed is None:
            return False
        set_state_here(self._dataset, self._start)
        return True

    def check_order(self, loader: DataLoader) -> bool:
        """Whether the stream was read again with other draws, with a warning if so; called once the iterator exists."""
        saved = None if self._resumed is None else self._resumed["next"]
        reads_again = saved is not None and not is_stateful(self._dataset)
        is_other = reads_again and self._draws_between and not is_same_state(saved, self._own.state_here())
        if is_other:
            rank_zero_warn(
                f"{type(self._dataset).__name__} has no `state_dict`, and was read again up to its place. It draws"
                " random numbers from global generators between its samples, and so does the training: if they decide"
                " which samples come, the samples differ now. Give it its own generator, a `state_dict` and"
                " `load_state_dict`, or num_workers=1."
            )
        return is_other

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Returns the next batch."""
        if self._resumed is not None and self._resumed["next"] is not None:
            set_state_here(self._dataset, self._resumed["next"])
        self._resumed = None
        before, latest = self._own.state_here(), self._state
        try:
            return next(batches)
        finally:
            if not is_same_state(before, self._own.state_here()):
                self._draws_between = self._draws_between or self._num_fetched > 0
                self._has_drawn = True
                if latest is not None:
                    latest.update(start=self._start, next=before)
            self._num_fetched += 1

    def state(self) -> dict[str, Any]:
        """Returns the states of the generators: at the pass's start, and before the next batch once that is fetched."""
        start = self._start if self._has_drawn else None
        self._state = {"start": start, "next": None, "draws_on": self._draws_between}
        return self._state
