"""Loaders that keep their own place: torchdata's `StatefulDataLoader`, for data that has no order to be dealt."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ..checkpoint.rng import get_random_state, set_random_state
from .copied import copied
from .drawing import is_same_state
from .own_generators import OwnGenerators, set_state_here

__all__ = [
    "Remembering",
    "as_stateful",
    "epoch_of",
    "is_hugging_faces",
    "is_stateful",
    "keeps_place",
    "remembering",
    "set_epoch",
    "told_by",
    "would_begin",
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


def would_begin(loader: Any) -> bool:
    """Whether `loader` begins an iterator, which draws an order, to say where it is: torchdata's that has none."""
    return isinstance(loader, StatefulDataLoader) and loader._iterator is None and not isinstance(loader, Remembering)


def is_hugging_faces(dataset: Any) -> bool:
    """Whether a data set is an `IterableDataset` of Hugging Face's."""
    return "_ex_iterable" in getattr(dataset, "__dict__", ())  # Hugging Face: what it reads from


def epoch_of(dataset: Any) -> int | None:
    """The epoch that a data set was told, by `set_epoch` or as its attribute `epoch`; None where it doesn't say."""
    epoch = getattr(dataset, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def told_by(dataset: Any) -> str:
    """Names, for a message, the call by which a data set is told its epoch."""
    return "set_epoch" if callable(getattr(dataset, "set_epoch", None)) else "its attribute `epoch`"


def set_epoch(dataset: Any, epoch: int | None) -> None:
    """Sets the epoch of a data set, a number that `epoch_of` returned."""
    if epoch is None or epoch_of(dataset) in (None, epoch):
        return
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        return
    try:
        dataset.epoch = epoch
    except AttributeError:  # a property that something else decides
        raise ValueError(
            f"{type(dataset).__name__}.epoch was {epoch} when the checkpoint was saved, and can't be set to it now:"
            " give the data set a `set_epoch(epoch)`, or load the weights alone to begin an epoch."
        ) from None


def why_no_state(dataset: Any) -> str | None:
    """Returns why a `StatefulDataLoader` could not ask a data set for its state; None where it could, or there is none.

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
    """The number of latest states that may be asked for."""
    _states: dict[int, dict[str, Any] | None]
    _present: dict[str, Any] | None = None
    _leftover: "_Leftover | None" = None
    applies_again = True
    """Whether the data set may apply a state that was loaded in later epochs as well."""
    data_epoch: int | None = None
    """The epoch that the data set reported when the latest iterator was made."""
    seen_epoch: int | None = None
    """The epoch that it reported after the latest batch: some data sets count their epochs themselves."""
    keeps_draws = False
    """Whether the states of workers have those of their generators."""
    _draws: "_Draws | None" = None
    _has_begun_twice = False

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
        if self.num_workers > 0 and not self.persistent_workers:
            return False  # new workers have copies of the data set as it is here
        return is_stateful(self.dataset) and not is_hugging_faces(self.dataset)

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins with the state that the one before has left: of the data set, or of its workers."""
        return self.evolves or (self.keeps_draws and self.persistent_workers)

    def resume(self, epoch: int, batches: int, state: dict[str, Any] | None) -> None:
        """Goes on where a loader was whose `state_after` these batches was `state`."""
        self._present = state
        self.begin(epoch, batches)
        self._draws = None
        if state is None or (batches == 0 and not self.goes_on):
            return
        keeps_dataset = isinstance(self, StatefulDataLoader) and is_stateful(self.dataset) and self.applies_again
        if keeps_dataset and self.persistent_workers:
            raise ValueError(
                f"{type(self.dataset).__name__} has a state of its own, in workers that stay (persistent_workers=True):"
                " it can't be seen whether the epochs after the resumed one would begin at its start. Go on with"
                " persistent_workers=False, or num_workers=0."
            )
        if keeps_dataset and self.num_workers == 0:
            self._leftover = _Leftover(self.dataset, begins_epoch=batches == 0)
        self.load_state_dict(copy.deepcopy(state["state"]))  # type: ignore[attr-defined]
        if self.num_workers == 0:
            self._draws = _Draws(self.dataset, state.get("draws") if batches else None)
        self._has_begun_twice = batches == 0
        if batches == 0 and not state["ended"]:
            before = get_random_state()
            super().__iter__()  # what was left of the epoch before, of which no more was asked for
            set_random_state(before)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.data_epoch = self.seen_epoch = epoch_of(self.dataset)
        if self.num_workers == 0 and (self._draws is None or not self._draws.begin()):
            self._draws = _Draws(self.dataset, None)
        batches: Iterator[Any] = self._iterator_of_loader()
        if self._draws is not None:
            self._draws.check_order(self)
        if self._leftover is not None and self._leftover.is_due:
            leftover, self._leftover = self._leftover, None
            before, first = OwnGenerators(self.dataset).state_here(), list(itertools.islice(batches, 1))
            if leftover.is_applied_again(first):
                leftover.clear()
                set_state_here(self.dataset, before)
                first, batches = [], super().__iter__()
            batches = itertools.chain(first, batches)
        self.seen_epoch = epoch_of(self.dataset)
        return _Noted(self, batches)

    def _iterator_of_loader(self) -> Iterator[Any]:
        is_twice, self._has_begun_twice = self._has_begun_twice, False
        if not is_twice:
            return super().__iter__()
        before = get_random_state()
        batches = super().__iter__()  # torchdata: makes the one that had ended, and another one; each draws a seed
        set_random_state(before)
        if not self.persistent_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The state after the latest batch; Lightning asks for it at each save.

        torchdata's own starts workers to ask them, which read ahead, where there is no iterator any more.
        """
        return super().state_dict() if self._present is None else self._present["state"]  # type: ignore[misc]

    def note(self, *, ended: bool) -> None:
        """Remembers the present state: one batch on, or at the end."""
        self.seen_epoch = epoch_of(self.dataset)
        if self._leftover is not None:
            self._leftover.note()
        self._present = {"state": copy.deepcopy(super().state_dict()), "ended": ended}  # type: ignore[misc]
        if self._draws is not None:
            self._present["draws"] = self._draws.state()
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
    """Detects a data set that applies the loaded state in every later pass, as some of Hugging Face's do.

    After the resumed epoch, the next pass of such a data set begins where the resumed one began, or is empty. Others
    begin where the last pass ended.

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
        """Sets the data set back to its start."""
        self._dataset.load_state_dict(self._initial)


class _Draws:
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
        # One without a state is read again: its order may be drawn when it is iterated, before anything is fetched.
        self._has_drawn = self._resumed is not None or not is_stateful(dataset)
        self._draws_on = self._resumed is not None and self._resumed["draws_on"]
        self._num_fetched = 0
        self._state: dict[str, Any] | None = resumed

    def begin(self) -> bool:
        """Called before the iterator is made; whether it is one that goes on."""
        if self._resumed is None:
            return False
        set_state_here(self._dataset, self._start)
        return True

    def check_order(self, loader: DataLoader) -> None:
        """Called when the iterator is there: says so if the stream was read with other draws than before."""
        then = None if self._resumed is None else self._resumed["next"]
        reads_again = then is not None and not is_stateful(self._dataset)
        if reads_again and self._draws_on and not is_same_state(then, self._own.state_here()):
            rank_zero_warn(
                f"{type(self._dataset).__name__} has no `state_dict`, and was read again up to its place. It draws"
                " random numbers from global generators between its samples, and so does the training: if they decide"
                " which samples come, other ones come now. Give it a generator of its own, a `state_dict` and"
                " `load_state_dict`, or num_workers=1."
            )

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch."""
        if self._resumed is not None and self._resumed["next"] is not None:
            set_state_here(self._dataset, self._resumed["next"])
        self._resumed = None
        before, latest = self._own.state_here(), self._state
        try:
            return next(batches)
        finally:
            if not is_same_state(before, self._own.state_here()):
                self._draws_on = self._draws_on or self._num_fetched > 0
                self._has_drawn = True
                if latest is not None:
                    latest.update(start=self._start, next=before)
            self._num_fetched += 1

    def state(self) -> dict[str, Any]:
        """Returns the generators as the pass began and, once it is fetched, before the batch after the latest one."""
        start = self._start if self._has_drawn else None
        self._state = {"start": start, "next": None, "draws_on": self._draws_on}
        return self._state


class _Noted:
    """An iterator of a loader that is told of each batch."""

    def __init__(self, loader: Remembering, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        draws = self._loader._draws
        try:
            batch = next(self._iterator) if draws is None else draws.fetch(self._iterator)
        except StopIteration:
            self._loader.note(ended=True)
            raise
        self._loader.note(ended=False)
        return batch


def remembering(
    loader: DataLoader, epoch: int, num_kept: Callable[[], int], kind: type[Remembering] = Remembering
) -> Remembering:
    """A copy of a stateful loader, of a subclass of its class that is a `kind`."""
    found = copied(loader, kind, num_kept=num_kept)
    found.begin(epoch)
    return found
