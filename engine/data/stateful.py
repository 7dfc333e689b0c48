"""Loaders that keep their own place: torchdata's `StatefulDataLoader`, for data that has no order to be dealt."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ..checkpoint.rng import get_random_state, set_random_state
from .copied import copied
from .drawing import is_same_state

__all__ = [
    "Remembering",
    "as_stateful",
    "epoch_of",
    "is_hugging_faces",
    "is_stateful",
    "keeps_place",
    "remembering",
    "set_epoch",
]

_ARGUMENTS = (
    "dataset",
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def is_stateful(loader: Any) -> bool:
    """Whether `loader` says where it is, and can go on there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def keeps_place(loader: Any) -> bool:
    """Whether the place is in a state of the loader's own, and not in the order of samples that it follows.

    That order alone says where a `StatefulDataLoader` is whose data set has a length, and no state.
    """
    if isinstance(loader, StatefulDataLoader):
        return isinstance(loader.dataset, IterableDataset) or is_stateful(loader.dataset)
    return is_stateful(loader)


def is_hugging_faces(dataset: Any) -> bool:
    """Whether a data set is an `IterableDataset` of Hugging Face's."""
    return "_ex_iterable" in getattr(dataset, "__dict__", ())  # Hugging Face: what it reads from


def epoch_of(dataset: Any) -> int | None:
    """The epoch that a data set was told by its `set_epoch`; None where it has none, or doesn't say."""
    epoch = getattr(dataset, "epoch", None) if callable(getattr(dataset, "set_epoch", None)) else None
    return epoch if isinstance(epoch, int) else None


def set_epoch(dataset: Any, epoch: int | None) -> None:
    """Tells a data set what `epoch_of` said of it."""
    if epoch is not None and epoch_of(dataset) not in (None, epoch):
        dataset.set_epoch(epoch)


def why_no_state(dataset: Any) -> str | None:
    """Why a `StatefulDataLoader` could not ask a data set for its state; None where it could, or there is none.

    litdata's wants arguments that only litdata's own loader has.
    """
    if not is_stateful(dataset):
        return None
    try:
        dataset.state_dict()
    except Exception:
        try:
            iter(dataset)  # some have a state from there on
            dataset.state_dict()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def as_stateful(loader: DataLoader) -> DataLoader:
    """A `StatefulDataLoader` in place of a plain loader over an `IterableDataset`; any other loader as it is.

    So is a loader of a data set whose state can't be asked for; a warning says so.
    """
    if type(loader) is not DataLoader:
        return loader
    if (reason := why_no_state(loader.dataset)) is not None:
        name = type(loader.dataset).__name__
        rank_zero_warn(
            f"The state_dict of {name} can't be asked for by a DataLoader ({reason}): a checkpoint in mid-epoch can't"
            f" be gone on with. Use the loader that {name} was made for."
        )
        return loader
    with warnings.catch_warnings():
        # Of torchdata's to torch 2.13; nothing a user could change.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(**{name: getattr(loader, name) for name in _ARGUMENTS})


class Remembering(DataLoader):
    """A stateful loader that remembers its state after each of its last batches.

    The state to save is seldom the present one: Lightning fetches a batch ahead of those that are trained on where it
    can't know which one is the last, and the batches of an unfinished accumulation are done again.
    """

    num_kept: Callable[[], int]
    """How many states are asked for at most."""
    _states: dict[int, dict[str, Any] | None]
    _present: dict[str, Any] | None = None
    _leftover: "_Leftover | None" = None
    data_epoch: int | None = None
    """What the data set said of its epoch when the latest iterator was made."""

    def begin(self, epoch: int, batches: int = 0) -> None:
        """Called before the first batch of an epoch, or of what is left of it after `batches` batches."""
        self._epoch, self._batches = epoch, batches
        self._states = {batches: self._present}

    def state_after(self, epoch: int, batches: int) -> dict[str, Any] | None:
        """State after a number of batches of an epoch; None is that of a new loader.

        Args:
            epoch: the present one, or the one after it.
            batches: in the present epoch, one of the last.
        """
        if epoch != self._epoch:
            return self._present
        return self._states.get(batches, next(iter(self._states.values())))

    @property
    def evolves(self) -> bool:
        """Whether an epoch may depend on those before: not if it is up to the iterator of a stream without a state.

        Nor do Hugging Face's, which apply a state to the epoch that it is of only.
        """
        if not isinstance(self, StatefulDataLoader):
            return True
        return is_stateful(self.dataset) and not is_hugging_faces(self.dataset)

    def resume(self, epoch: int, batches: int, state: dict[str, Any] | None) -> None:
        """Goes on where a loader was whose `state_after` these batches was `state`."""
        self._present = state
        self.begin(epoch, batches)
        if state is None or (batches == 0 and not self.evolves):
            return
        keeps_dataset = isinstance(self, StatefulDataLoader) and is_stateful(self.dataset)
        if keeps_dataset and self.persistent_workers:
            raise ValueError(
                f"{type(self.dataset).__name__} has a state of its own, in workers that stay (persistent_workers=True):"
                " it can't be seen whether the epochs after the resumed one would begin at its start. Go on with"
                " persistent_workers=False, or num_workers=0."
            )
        if keeps_dataset and self.num_workers == 0:
            self._leftover = _Leftover(self.dataset, begins_epoch=batches == 0)
        self.load_state_dict(copy.deepcopy(state["state"]))  # type: ignore[attr-defined]
        if batches == 0 and not state["ended"]:
            super().__iter__()  # what was left of the epoch before, of which no more was asked for

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.data_epoch = epoch_of(self.dataset)
        batches: Iterator[Any] = super().__iter__()
        if self._leftover is not None and self._leftover.is_due:
            leftover, self._leftover = self._leftover, None
            before, first = get_random_state(), list(itertools.islice(batches, 1))
            if leftover.is_applied_again(first):
                leftover.clear()
                set_random_state(before)
                first, batches = [], super().__iter__()
            batches = itertools.chain(first, batches)
        return _Noted(self, batches)

    def state_dict(self) -> dict[str, Any]:
        """The state after the latest batch; Lightning asks for it at each save.

        torchdata's own starts workers to ask them, which read ahead, where there is no iterator any more.
        """
        return super().state_dict() if self._present is None else self._present["state"]  # type: ignore[misc]

    def note(self, *, ended: bool) -> None:
        """Remembers the present state: one batch on, or at the end."""
        if self._leftover is not None:
            self._leftover.note()
        self._present = {"state": copy.deepcopy(super().state_dict()), "ended": ended}  # type: ignore[misc]
        if not ended:
            self._keep()

    def repeat(self) -> None:
        """Counts a batch beyond the last one."""
        self._keep()

    def _keep(self) -> None:
        self._batches += 1
        self._states[self._batches] = self._present
        for oldest in list(self._states)[: -self.num_kept()]:
            del self._states[oldest]


class _Leftover:
    """The state that a data set was resumed with, which some (Hugging Face's) apply in all passes to come.

    They are known by what they do: after the resumed epoch, the next pass begins where that one began, or has
    nothing left. Others go on from what they have become.

    Args:
        dataset: before the state is loaded.
        begins_epoch: the state is that of the end of an epoch.
    """

    def __init__(self, dataset: Any, *, begins_epoch: bool) -> None:
        self._dataset = dataset
        self._initial = copy.deepcopy(dataset.state_dict())
        self._first: Any = None
        self._has_first = False
        self._begins_epoch = begins_epoch

    @property
    def is_due(self) -> bool:
        """Whether the next pass is the one to look at."""
        return self._begins_epoch or self._has_first

    def note(self) -> None:
        """Called after each batch of the resumed epoch, and at its end."""
        if not self._has_first:
            self._first, self._has_first = copy.deepcopy(self._dataset.state_dict()), True

    def is_applied_again(self, first: list[Any]) -> bool:
        """Whether a pass, of which `first` was read, began with the state that was loaded."""
        return not first or (self._has_first and is_same_state(self._dataset.state_dict(), self._first))

    def clear(self) -> None:
        """Has the data set begin at its start."""
        self._dataset.load_state_dict(self._initial)


class _Noted:
    """An iterator of a loader that is told of each batch."""

    def __init__(self, loader: Remembering, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._loader.note(ended=True)
            raise
        self._loader.note(ended=False)
        return batch


def remembering(loader: DataLoader, epoch: int, num_kept: Callable[[], int]) -> Remembering:
    """A copy of a stateful loader, of a subclass of its class."""
    found = copied(loader, Remembering, num_kept=num_kept)
    found.begin(epoch)
    return found
