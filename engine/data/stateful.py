"""Loaders with a state of their position: for streams, and for data sets with a state."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from ..checkpoint.rng import get_random_state, is_same_state, set_random_state
from .clone_loader import classes_of_torchdata, clone_loader, is_torchdata_loader
from .own_generators import OwnGenerators, States, set_state_here
from .stream_loader import OTHER_BATCHES, StreamLoader, can_be_read, is_stateful

__all__ = [
    "KeptStates",
    "StateTrackingLoader",
    "as_stateful",
    "epoch_of",
    "epoch_setter",
    "form_in_words",
    "form_of",
    "has_position_state",
    "is_hugging_face_dataset",
    "is_litdata_loader",
    "is_stateful",
    "set_epoch",
    "starts_iterator",
    "track_states",
    "tracks_own_position",
]


def has_position_state(loader: Any) -> bool:
    """Whether `loader` has a state of its data set and workers: a `StreamLoader`, or torchdata's."""
    return isinstance(loader, StreamLoader) or is_torchdata_loader(loader)


def tracks_own_position(loader: Any) -> bool:
    """Whether the position is in a state of the loader, and not in the order of samples that it follows.

    A `StatefulDataLoader` of a data set with a length and without a state follows an order.
    """
    if is_torchdata_loader(loader):
        return isinstance(loader.dataset, IterableDataset) or is_stateful(loader.dataset)
    return is_stateful(loader)


def form_of(loader: Any) -> dict[str, Any]:
    """Returns the batch size and the number of workers for which a state of a loader is valid."""
    return {name: getattr(loader, name, None) for name in ("batch_size", "num_workers")}


def form_in_words(form: dict[str, Any]) -> str:
    """Returns the result of `form_of`, or a saved one, for a message."""
    return f"batch_size={form['batch_size']} and num_workers={form['num_workers']}"


def is_litdata_loader(loader: Any) -> bool:
    """Whether a loader is litdata's own."""
    return any(cls.__module__.partition(".")[0] == "litdata" for cls in type(loader).__mro__)


def starts_iterator(loader: Any) -> bool:
    """Whether `loader.state_dict()` would create an iterator, which draws: so does torchdata's if it has none yet."""
    return is_torchdata_loader(loader) and loader._iterator is None and not isinstance(loader, StateTrackingLoader)


def is_hugging_face_dataset(dataset: Any) -> bool:
    """Whether a data set is an `IterableDataset` of Hugging Face's."""
    return "_ex_iterable" in getattr(dataset, "__dict__", ())  # Hugging Face: what it reads from


def _why_no_state(dataset: Any) -> str | None:
    """Returns why a loader can't read the state of a data set; None if it can, or if there is no state.

    litdata's `state_dict` needs arguments that only litdata's own loader has.
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
    """Returns a `StreamLoader` in place of a plain loader of an `IterableDataset`, and any other loader as it is.

    A torchdata loader is replaced, too, if its stream has no state: read again, such a stream may yield other batches,
    and torchdata's loader does not detect that. If the state of a data set can't be read, it warns, and returns the
    loader as it is.
    """
    standard = DataLoader, *classes_of_torchdata("stateful_dataloader", "StatefulDataLoader")
    if type(loader) not in standard or not can_be_read(loader):
        return loader
    if is_torchdata_loader(loader) and is_stateful(loader.dataset):
        return loader
    if (reason := _why_no_state(loader.dataset)) is not None:
        name = type(loader.dataset).__name__
        rank_zero_warn(
            f"The state_dict of {name} can't be asked for by a DataLoader ({reason}): training can't resume from a"
            f" checkpoint in mid-epoch. Use the loader that {name} was made for."
        )
        return loader
    return clone_loader(loader, StreamLoader)


class StateTrackingLoader(DataLoader):
    """A stateful loader that keeps its states after each of its latest batches.

    The state to save is rarely the current one: Lightning fetches one batch ahead if it does not know which batch is
    the last, and the batches of an unfinished accumulation are repeated by a resumed run.
    """

    num_kept: Callable[[], int]
    """Returns the number of latest states that are kept."""
    _states: dict[int, dict[str, Any] | None]
    _latest: dict[str, Any] | None = None
    _reapplied_state: "_ReappliedState | None" = None
    applies_again = True
    """Whether the data set may apply a loaded state in later epochs again."""
    data_epoch: int | None = None
    """The epoch of the data set when the latest iterator was made."""
    seen_epoch: int | None = None
    """The epoch of the data set after the latest batch: some data sets count epochs themselves."""
    keeps_draws = False
    """Whether the states of workers include those of their generators."""
    _draws: "_PassDraws | None" = None
    _has_begun_twice = False
    _initial: Any = None
    """The state at the start of the first epoch: the resumed one, or that of the data set."""
    _is_iterated = _is_resumed = False

    def begin(self, epoch: int, batches: int = 0) -> None:
        """Called before the first batch of an epoch, or before batch `batches` of a resumed one."""
        self._epoch, self._batches = epoch, batches
        self._states = {batches: self._latest}
        self._is_iterated = False

    def begin_again(self, epoch: int) -> None:
        """Called before the iterator of an epoch is created. A new loader has had another iterator before.

        Lightning has fetched a batch from that one. A data set with a state would continue after this batch, so it is
        set back to the state before it.
        """
        is_second = epoch == self._epoch and self._is_iterated
        if epoch != self._epoch and is_litdata_loader(self):
            # litdata clears it when a pass is read to its end, past its last batch, and would apply the state again.
            self.restore = False
        if is_second and has_position_state(self) and self.has_cross_epoch_state:
            self._latest = self._draws = None
            self.load_state_dict({})  # type: ignore[attr-defined]  # torchdata: lets go of workers that stay
            if self._is_resumed:
                self.resume(epoch, 0, self._initial)
            elif is_stateful(self.dataset) and self.num_workers == 0:
                self.dataset.load_state_dict(self._initial)  # type: ignore[attr-defined]
        self.begin(epoch)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any] | None:
        """Returns the state after a number of batches of an epoch; None stands for the state of a new loader.

        Args:
            epoch: the current epoch, or the next one.
            batches: number of batches; in the current epoch, one of those whose states are kept.
        """
        oldest = next(iter(self._states.values()))
        state = self._states.get(batches, oldest) if epoch == self._epoch else self._latest
        if state is None or state.get("draws") is None:
            return state
        # As plain values only now: most states are of no checkpoint.
        draws = {name: v.plain() if isinstance(v, States) else v for name, v in state["draws"].items()}
        return {**state, "draws": draws}

    def place_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns `state_after`, for a checkpoint, with whatever else another run needs to continue there."""
        return {"state": self.state_after(epoch, batches)}

    @property
    def has_cross_epoch_state(self) -> bool:
        """Whether an epoch may depend on earlier ones: not if the stream has no state.

        Streams of Hugging Face do not depend on them either: they apply a state in its own epoch only.
        """
        if not has_position_state(self):
            return True
        if self.num_workers > 0 and not self.persistent_workers:
            return False  # new workers have copies of the data set as it is here
        return is_stateful(self.dataset) and not is_hugging_face_dataset(self.dataset)

    @property
    def continues_across_epochs(self) -> bool:
        """Whether an epoch begins with the state at the end of the last one: of the data set, or of its workers."""
        return self.has_cross_epoch_state or (self.keeps_draws and self.persistent_workers)

    def resume(self, epoch: int, batches: int, state: dict[str, Any] | None) -> None:
        """Resumes at a position.

        Args:
            epoch: epoch of the position.
            batches: batches of the epoch that are done.
            state: what `state_after` returned for these in the saved run.
        """
        self._latest = self._initial = state
        self.begin(epoch, batches)
        self._draws, self._is_resumed = None, state is not None
        if state is None or (batches == 0 and not self.continues_across_epochs):
            return
        keeps_dataset = has_position_state(self) and is_stateful(self.dataset) and self.applies_again
        if keeps_dataset and self.persistent_workers:
            raise ValueError(
                f"{type(self.dataset).__name__} has a state of its own, in workers that stay (persistent_workers=True):"
                " it can't be seen whether the epochs after the resumed one would begin at its start. Go on with"
                " persistent_workers=False, or num_workers=0."
            )
        if keeps_dataset and self.num_workers == 0:
            self._reapplied_state = _ReappliedState(self.dataset, begins_epoch=batches == 0)
        self.load_state_dict(copy.deepcopy(state["state"]))  # type: ignore[attr-defined]
        if self.num_workers == 0:
            self._draws = _PassDraws(self.dataset, state.get("draws") if batches else None)
        self._has_begun_twice = batches == 0
        if batches == 0 and not state["ended"]:
            before = get_random_state()
            super().__iter__()  # the rest of the last epoch, which the saved run did not read
            set_random_state(before)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.data_epoch = self.seen_epoch = epoch_of(self.dataset)
        # Loaders of other libraries may read the state of a data set in another way.
        if (
            self._initial is None
            and has_position_state(self)
            and self.has_cross_epoch_state
            and is_stateful(self.dataset)
        ):
            self._initial = copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
        self._is_iterated = True
        if self.num_workers == 0 and (self._draws is None or not self._draws.begin()):
            self._draws = _PassDraws(self.dataset, None)
        batches: Iterator[Any] = self._iterator_of_loader()
        is_warned = self._draws is not None and self._draws.check_order(self)
        if getattr(batches, "is_another", False) and not is_warned:
            # Of the user's data set inside a proxy.
            name = type(getattr(self.dataset, "dataset", self.dataset)).__name__
            raise ValueError(OTHER_BATCHES.format(name=name))
        if self._reapplied_state is not None and self._reapplied_state.is_due:
            reapplied, self._reapplied_state = self._reapplied_state, None
            before, first = OwnGenerators(self.dataset).here(), list(itertools.islice(batches, 1))
            if reapplied.is_applied(first):
                reapplied.clear()
                set_state_here(self.dataset, before.plain())
                first, batches = [], super().__iter__()
            batches = itertools.chain(first, batches)
        self.seen_epoch = epoch_of(self.dataset)
        return _TrackingIterator(self, batches)

    def _iterator_of_loader(self) -> Iterator[Any]:
        is_twice, self._has_begun_twice = self._has_begun_twice, False
        if not is_twice:
            return super().__iter__()
        before = get_random_state()
        batches = super().__iter__()  # creates again the iterator that had ended, then a new one; each draws a seed
        set_random_state(before)
        if not self.persistent_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the latest batch; Lightning calls it at each save.

        If there is no iterator any more, torchdata's own method would start workers, which read ahead.
        """
        return super().state_dict() if self._latest is None else self._latest["state"]  # type: ignore[misc]

    def note(self, *, ended: bool) -> None:
        """Keeps the current state, after one more batch or at the end."""
        if self._reapplied_state is not None:
            self._reapplied_state.note_batch()
        is_ours = isinstance(self, StreamLoader)
        source: Any = self._iterator if is_ours else super()
        state = source.state_dict()
        # The next batch may change that of other loaders.
        latest: dict[str, Any] = {"state": state if is_ours else copy.deepcopy(state), "ended": ended}
        if self._draws is not None:
            latest["draws"] = self._draws.latest
        epoch = getattr(self.dataset, "epoch", None)
        # torch: DataLoader.__setattr__ takes a call for each.
        vars(self).update(_latest=latest, seen_epoch=epoch if isinstance(epoch, int) else None)
        if not ended:
            self._keep()

    def repeat(self) -> None:
        """Counts a padding batch, after the last one of this rank."""
        self._keep()

    def _keep(self) -> None:
        vars(self)["_batches"] += 1
        self._states[self._batches] = self._latest
        for oldest in list(self._states)[: -self.num_kept()]:
            del self._states[oldest]


class _TrackingIterator:
    """An iterator that notes each batch in its loader."""

    def __init__(self, loader: StateTrackingLoader, iterator: Iterator[Any]) -> None:
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


def track_states(
    loader: DataLoader, epoch: int, num_kept: Callable[[], int], kind: type[StateTrackingLoader] = StateTrackingLoader
) -> StateTrackingLoader:
    """Returns a copy of a stateful loader that keeps its states.

    Args:
        loader: is not changed.
        epoch: the current one.
        num_kept: returns the number of latest states that are kept.
        kind: the class that the copy's class derives from as well.
    """
    tracking = clone_loader(loader, kind, num_kept=num_kept)
    tracking.begin(epoch)
    return tracking


# --- draws of a pass
# The random draws of one pass over a stream that this process reads itself; a resumed pass repeats them.


class _PassDraws:
    """Follows the random generators through one pass over a stream in this process.

    Args:
        dataset: the stream.
        resumed: the `latest` of the pass that is resumed, as plain values; None for a new one.
    """

    def __init__(self, dataset: Any, resumed: dict[str, Any] | None) -> None:
        self._dataset = dataset
        self._own = OwnGenerators(dataset)
        self._resumed = resumed if resumed is not None and resumed["start"] is not None else None
        self._start: Any = self._own.here() if self._resumed is None else self._resumed["start"]
        # A stream without a state is read again: it may draw its order when the iterator is made, before a fetch.
        self._has_drawn = self._resumed is not None or not is_stateful(dataset)
        self._draws_between = self._resumed is not None and self._resumed["draws_on"]
        self._num_fetched = 0
        self.latest = resumed
        """The states of the generators after the latest batch: at the pass's start, and before the next batch once that
        is fetched; None in place of both if nothing was drawn."""

    def begin(self) -> bool:
        """Called before the iterator is made; returns whether it resumes a pass."""
        if self._resumed is None:
            return False
        set_state_here(self._dataset, self._start)
        return True

    def check_order(self, loader: DataLoader) -> bool:
        """Whether the stream was read again with other draws, with a warning if so; called once the iterator exists."""
        saved = None if self._resumed is None else self._resumed["next"]
        is_read_again = self._draws_between and not is_stateful(self._dataset)
        is_other = saved is not None and is_read_again and States.of(saved) != self._own.here()
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
        before, own_before = self._own.read()
        try:
            return next(batches)
        finally:
            after, own_after = self._own.read()
            if before != after or ((own_before or own_after) and not is_same_state(own_before, own_after)):
                self._draws_between = self._draws_between or self._num_fetched > 0
                self._has_drawn = True
                if self.latest is not None:
                    self.latest.update(start=self._start, next=States(before, own_before))
            self._num_fetched += 1
            start = self._start if self._has_drawn else None
            self.latest = {"start": start, "next": None, "draws_on": self._draws_between}


# --- states that are applied again
# Detects a data set that applies a loaded state again in the epochs after the resumed one.


class _ReappliedState:
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


def epoch_of(dataset: Any) -> int | None:
    """Returns the attribute `epoch` of a data set; None without one."""
    epoch = getattr(dataset, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def epoch_setter(dataset: Any) -> str:
    """Names, for a message, how the epoch of a data set is set."""
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
            " give the data set a `set_epoch(epoch)`, or load only the weights to begin an epoch."
        ) from None


# Keeps the states of a loader that is not a `DataLoader`, such as a node of torchdata, after each of its batches.
#
# Such a loader's state may leave out the generators that its order is drawn from: torchdata's nodes make the iterator
# of a sampler again, and skip what was read. So the states of the generators when the pass began are kept as well.


class KeptStates:
    """Iterates a loader with `state_dict`, and keeps its states after its latest batches.

    Lightning fetches one batch ahead if it does not know which batch is the last: the loader's own state is then
    after that batch, on which nothing was trained yet.

    Args:
        loader: the user's loader.
        epoch: returns the number of the current epoch.
        num_done: returns the number of batches of the epoch that were done before a pass.
        num_kept: returns the number of latest states that are kept.
    """

    def __init__(
        self, loader: Any, epoch: Callable[[], int], num_done: Callable[[], int], num_kept: Callable[[], int]
    ) -> None:
        self.loader = loader
        self._epoch, self._num_done, self._num_kept = epoch, num_done, num_kept
        self._states: dict[int, Any] = {}
        self._epoch_of_states = -1
        self._resumed: dict[str, Any] | None = None
        self._start: dict[str, Any] | None = None
        self._is_over = False

    def resume(self, start: dict[str, Any] | None, *, is_over: bool) -> None:
        """Makes the next pass that of a saved run.

        Args:
            start: the states of the generators at the start of the pass; None for a new one.
            is_over: the saved run had done the last batch of the pass, which yields nothing.
        """
        self._resumed, self._start, self._is_over = start, start, is_over

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self._is_over = False
            return iter(())
        resumed, self._resumed = self._resumed, None
        current = OwnGenerators(self.loader).here().plain()
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

    def place_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns the state after a number of batches of an epoch, with those of generators at its start and now."""
        is_kept = epoch == self._epoch_of_states and batches in self._states
        return {
            "state": self._states[batches] if is_kept else self.loader.state_dict(),
            "pass_start": self._start,
            "generators_now": OwnGenerators(self.loader).states(),
        }
