"""Draws the order of one pass over a sampler like a stock loader, keeps it, and draws it again in a resumed run.

A sampler draws from its own generator, or from the global ones. Another run needs only their states right before a pass
to draw the same order: `DrawnOrder.before`, which checkpoints contain, and which rank 0 broadcasts.
"""

import inspect
import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ..checkpoint.errors import CheckpointError
from ..checkpoint.rng import get_random_state, host_state, is_same_state, set_random_state
from .clone_loader import classes_of_torchdata

__all__ = [
    "DrawnOrder",
    "OrderRecord",
    "PassHistory",
    "draws_at_once",
    "preserve_generators",
    "restore_sampler",
    "state_before",
    "state_of",
]

_IN_ORDER = (SequentialSampler, list, tuple, range)
_FIXED = (SequentialSampler, tuple, range)
"""Samplers whose order is known when a pass begins: it does not matter when it is read."""
_TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def draws_at_once(users: Any, sampler: Any) -> bool:
    """Whether the order may be drawn as soon as an iterator over `users` is created, before its first item is read.

    This matters with workers: torch then creates two iterators, and reads only the second one.

    Args:
        users: the sampler or batch sampler that a DataLoader iterates. In torch's samplers, `__iter__` is a generator
            function, which draws nothing before the first item. This is not so for torchdata's samplers.
        sampler: the sampler in it that draws the order.
    """
    return all(not inspect.isgeneratorfunction(type(source).__iter__) for source in (users, sampler))


def _generator_of(sampler: Any) -> torch.Generator | None:
    """Returns the generator that the user gave to a sampler, or to the sampler of a batch sampler; None without one."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            return generator
    return None


def _is_torchs(sampler: Any) -> bool:
    """Whether a sampler is torch's: it uses only torch's generators, and after its first item only one of its own."""
    return type(sampler) in _TORCHS or type(sampler) in classes_of_torchdata("sampler", "RandomSampler")


def state_of(sampler: Any) -> Any:
    """Returns the `state_dict` of a sampler, or the state of its own generator; None without either."""
    if hasattr(sampler, "load_state_dict"):
        return sampler.state_dict()
    generator = _generator_of(sampler)
    return None if generator is None else generator.get_state()


def _set_state(sampler: Any, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        _set_generator(sampler, state)
    elif state is not None and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state)


def _set_generator(sampler: Any, state: Any) -> None:
    generator = _generator_of(sampler)
    if generator is not None and isinstance(state, torch.Tensor):
        generator.set_state(state)


def state_before(sampler: Any) -> dict[str, Any]:
    """Returns the states that the next pass over `sampler` draws from: of the global generators, and of the sampler."""
    return {"global": _global_state(sampler), "sampler": state_of(sampler)}


def _global_state(sampler: Any) -> dict[str, Any] | None:
    if type(sampler) in _IN_ORDER or (_is_torchs(sampler) and _generator_of(sampler) is not None):
        return None
    if _is_torchs(sampler):
        return {"torch": torch.get_rng_state()}
    return host_state()


def _set_global(state: dict[str, Any] | None) -> None:
    if state is not None:
        set_random_state({**get_random_state(), **state})


@contextmanager
def preserve_generators(sampler: Any) -> Iterator[None]:
    """Context that restores the global generators, and the sampler's own, at its end."""
    before = state_before(sampler)
    try:
        yield
    finally:
        _set_global(before["global"])
        _set_state(sampler, before["sampler"])


_MOST_PASSES = 1 << 22
"""The most passes of a sampler that are repeated: short ones take a minute."""


def restore_sampler(sampler: Any, num_passes: int, state: Any) -> None:
    """Sets a new sampler to the state that it had after a number of passes.

    Args:
        sampler: the new sampler.
        num_passes: number of passes; a user's sampler without a state, generator and `set_epoch` repeats them.
        state: what `state_of` returned for the sampler after these passes.
    """
    has_state = (
        _generator_of(sampler) is not None or hasattr(sampler, "load_state_dict") or hasattr(sampler, "set_epoch")
    )
    if num_passes and not has_state and type(sampler) not in _IN_ORDER and not _is_torchs(sampler):
        if num_passes > _MOST_PASSES:
            raise CheckpointError(
                f"The checkpoint says that {type(sampler).__name__} has made {num_passes} passes, which are too many to"
                " repeat: give it state_dict() and load_state_dict(), or set_epoch()."
            )
        everything = get_random_state()
        for _ in range(num_passes):
            indices = iter(sampler)
            list(itertools.islice(indices, len(sampler)))
            next(indices, None)  # a sampler may draw, or count its passes, at its end
        set_random_state(everything)
    _set_state(sampler, state)


_BLOCK = 2**14
"""The most items that are drawn as Python integers at once, since these are large."""


class OrderRecord:
    """The items that one pass over a sampler has yielded so far.

    Args:
        before: the `state_before` the pass; None until it is known.
    """

    def __init__(self, before: dict[str, Any] | None = None) -> None:
        self.before = before
        self.order: Any = array("q")  # 8 or 4 bytes a number, since it is kept for an epoch; a list for other items
        self._digested = (0, 0)

    def add(self, items: Any) -> None:
        """Appends the next items, a list or an array of integers."""
        are_integers = isinstance(items, array) or set(map(type, items)) <= {int}
        if not len(self.order):
            if isinstance(items, array):
                self.order = items  # not copied: a permutation of all samples is large, and nothing else owns it
                return
            self.order = array("q") if are_integers else _CompactOrder()
        fits = self.order.fits(items) if isinstance(self.order, _CompactOrder) else are_integers
        if not fits and not isinstance(self.order, list):
            self.order = list(self.order)
        self.order.extend(items)

    def digest(self, position: int) -> int:
        """Returns a checksum of the order up to a position."""
        at, crc = self._digested if self._digested[0] <= position else (0, 0)
        for start in range(at, position, _BLOCK):
            block = self.order[start : min(start + _BLOCK, position)]
            if isinstance(block, array):  # as 8 bytes a number, whatever the dtype of the array: checkpoints compare it
                crc = zlib.crc32(np.asarray(block).astype(np.int64, copy=False).tobytes(), crc)
            else:
                crc = zlib.crc32("".join(map(repr, block)).encode(), crc)
        self._digested = (position, crc)
        return crc


def _blocks_of(sampler: Any) -> Callable[[int], Any]:
    """Returns a function that draws the next items of a pass: about as many as it is asked for, none at the end."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        permutations = _permutations(sampler)
        return lambda _: next(permutations, None)
    indices = iter(sampler)
    return lambda size: list(itertools.islice(indices, size))


def _permutations(sampler: RandomSampler) -> Iterator["array[int]"]:
    """Yields the order of `sampler` in arrays: its own iterator makes Python integers, of five times the memory.

    Follows torch's `RandomSampler.__iter__`, draw by draw.
    """
    generator, size = sampler.generator, len(sampler.data_source)
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // size):
        yield _permutation(size, generator)
    rest = sampler.num_samples % size
    if rest or sampler.generator is not None:  # torch draws it even if it is unused, which changes a user's generator
        yield _permutation(size, generator)[:rest]


def _permutation(size: int, generator: torch.Generator) -> "array[int]":
    # torch draws the same permutation for either dtype, and int32 faster.
    code, dtype = ("i", torch.int32) if size < 2**31 else ("q", torch.int64)
    indices = array(code, [0]) * size
    torch.randperm(size, generator=generator, out=torch.frombuffer(indices, dtype=dtype))
    return indices


class DrawnOrder(OrderRecord):
    """The order of one pass, drawn from a sampler by the engine.

    Args:
        sampler: the sampler that draws.
        whole: draw the whole order at once, unless the sampler is torch's: the global generators of several ranks
            differ after the first step, so a later draw would differ as well.
        before: states to draw from, without changing the global generators; None: draw from the global generators.
        broadcast: returns rank 0's value on all ranks; None with one process.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        whole: bool = False,
        before: dict[str, Any] | None = None,
        broadcast: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(before)
        self.sampler = sampler
        self.at = 0
        """The position of the next item that `take` returns."""
        self.is_whole = whole and type(sampler) not in _IN_ORDER and not _is_torchs(sampler)
        self._is_again = before is not None
        self._broadcast = broadcast
        self._blocks: Callable[[int], Any] | None = None
        self._after: Any = None
        self._global_after: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": None, "_broadcast": None}

    def up_to(self, end: int) -> Any:
        """Returns the order, with at least its first `end` items drawn, if it has as many."""
        if end <= len(self.order):
            return self.order
        end = min(end, len(self.sampler))  # type: ignore[arg-type]
        if end > len(self.order) and self._blocks is None:
            with self._generators():
                self._blocks = _blocks_of(self.sampler)
                self._pull(len(self.sampler) if self.is_whole else end)  # type: ignore[arg-type]
        elif end > len(self.order):
            self._pull(end)
        return self.order

    def open(self) -> None:
        """Makes the sampler's iterator, which may draw."""
        with self._generators():
            self._blocks = _blocks_of(self.sampler)
            if self.is_whole:
                self._pull(len(self.sampler))  # type: ignore[arg-type]

    def take(self, size: int) -> list[Any]:
        """Returns the next `size` items, fewer at the end."""
        items = list(self.up_to(self.at + size)[self.at : self.at + size])
        self.at += len(items)
        if len(items) < size and self._blocks is not None:
            self._blocks(1)  # a reader that asks for more reaches the end, where a sampler may draw once more
        return items

    def go_on(self) -> None:
        """Restores the sampler's generator before items are taken, since a DataLoader may have drawn from it."""
        _set_generator(self.sampler, self._after)
        self._after = None

    def settle(self) -> None:
        """Advances the global generators past the draws of the order; called when they have the saved run's states.

        Does nothing if these states are from after the order was drawn: with workers the order is drawn early, without
        workers it is drawn with the first batch.
        """
        before, after = (self.before or {}).get("global"), self._global_after
        if before is not None and after is not None and is_same_state(before, _global_state(self.sampler)):
            _set_global(after)

    def end_with(self, state: Any) -> None:
        """Marks the pass as over, and sets the state that its sampler had then."""
        self._blocks = lambda _: []
        _set_state(self.sampler, state)

    def _pull(self, end: int) -> None:
        assert self._blocks is not None
        # Read ahead if nothing can notice it, which is much faster than batch by batch.
        least = _BLOCK if type(self.sampler) in _FIXED else 0
        while len(self.order) < end and (block := self._blocks(max(least, min(end - len(self.order), _BLOCK)))):
            self.add(block)

    @contextmanager
    def _generators(self) -> Iterator[None]:
        states = state_before(self.sampler)
        if self.before is None:
            has_none = states["global"] is None and states["sampler"] is None
            self.before = states if self._broadcast is None or has_none else self._broadcast(states)
        is_own = is_same_state(self.before["global"], states["global"])
        if not is_own:
            _set_global(self.before["global"])
        if not is_own or not is_same_state(self.before["sampler"], states["sampler"]):
            _set_state(self.sampler, self.before["sampler"])
        try:
            yield
        finally:
            # Ranks whose generators agree with rank 0's advance as it does; those of the others are restored.
            if not is_own:
                self._global_after = _global_state(self.sampler)
                _set_global(states["global"])
            self._after = state_of(self.sampler) if self._is_again else None


class PassHistory:
    """The passes over one sampler. An epoch has several if the loader is shorter than another one, and restarts.

    The last two passes are kept: a checkpoint may be for an earlier batch than the one that was fetched last.
    """

    def __init__(self) -> None:
        self.num_before = 0
        """The number of passes in earlier epochs."""
        self._epoch = -1
        self._of_epoch: dict[int, Any] = {}
        self._num = 0

    def begin(self, epoch: int, record: Any, *, replaces_latest: bool = False, has_drawn: bool = False) -> None:
        """Adds a pass that begins.

        Args:
            epoch: the current epoch.
            record: record of the pass.
            replaces_latest: whether it replaces the latest pass, of which nothing was read.
            has_drawn: whether the replaced pass has drawn its order nevertheless; then it counts as an earlier pass.
        """
        if replaces_latest and epoch == self._epoch:
            self._of_epoch[self._num - 1] = record
            self.num_before += has_drawn
            return
        if epoch != self._epoch:
            self.num_before += self._num
            self._epoch, self._num = epoch, 0
            self._of_epoch.clear()
        self._of_epoch[self._num] = record
        self._of_epoch.pop(self._num - 2, None)
        self._num += 1

    def begin_again(self, epoch: int) -> None:
        """Counts the passes of this epoch so far as earlier ones: a second iterator reads the epoch from its start."""
        if epoch == self._epoch:
            self.num_before += self._num
            self._num = 0
            self._of_epoch.clear()

    def resume(self, num_before: int) -> None:
        """Sets the number of passes before those of the resumed epoch."""
        self.num_before = num_before

    def num_until(self, epoch: int, number: int) -> int:
        """Returns the number of passes before pass `number` of an epoch, including those of earlier epochs."""
        return self.num_before + (number if epoch == self._epoch else self._num)

    def of(self, epoch: int, number: int) -> Any:
        """Returns pass `number` of an epoch; None if it has not begun, or is not kept any more."""
        return self._of_epoch.get(number) if epoch == self._epoch else None

    @property
    def latest(self) -> Any:
        """The last pass that has begun; None before the first one."""
        return self._of_epoch.get(self._num - 1)


# --- a compact order
# Stores an order of samples in 8 bytes a number, and yields the items as the user's sampler has yielded them.
#
# In a list, a Python or NumPy integer takes 40 bytes, and a tensor of one number 400.


_Kind = tuple[bool, Any]
"""Whether the items are lists, and the type of their numbers; None if they are not all numbers of one type."""


class _CompactOrder:
    """Items of one kind: NumPy's integers, tensors of one int64, or lists of these or of integers."""

    def __init__(self) -> None:
        self._kind: _Kind | None = None
        self._numbers = array("q")
        self._ends = array("q")
        """The position after the last number of each list."""

    def fits(self, items: list[Any]) -> bool:
        """Whether `items` are of the kind of those before; the first ones decide."""
        kind = _kind_of(items)
        return kind[1] is not None and self._kind in (None, kind)

    def extend(self, items: list[Any]) -> None:
        """Adds items that fit."""
        self._kind = are_lists, kind = _kind_of(items)
        for numbers in items if are_lists else [items]:
            self._numbers.extend(torch.stack(numbers).tolist() if kind is torch.Tensor and numbers else numbers)
            if are_lists:
                self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends if self._are_lists else self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self._list(at) if self._are_lists else self._read(at, at + 1)[0]
        start, stop, _ = index.indices(len(self))
        return [self._list(at) for at in range(start, stop)] if self._are_lists else self._read(start, stop)

    @property
    def _are_lists(self) -> bool:
        return self._kind is not None and self._kind[0]

    def _list(self, at: int) -> list[Any]:
        return self._read(self._ends[at - 1] if at else 0, self._ends[at])

    def _read(self, start: int, stop: int) -> list[Any]:
        numbers = self._numbers[start:stop].tolist()
        assert self._kind is not None
        kind = self._kind[1]
        if kind is int:
            return numbers
        return [torch.tensor(number) for number in numbers] if kind is torch.Tensor else list(map(kind, numbers))


def _kind_of(items: list[Any]) -> _Kind:
    are_lists = set(map(type, items)) == {list}
    numbers: Iterable[Any] = [number for item in items for number in item] if are_lists else items
    kinds = set(map(type, numbers)) or {int}
    kind = kinds.pop()
    if kinds or not _is_kept(kind, numbers) or (kind is int and not are_lists):
        return are_lists, None
    return are_lists, kind


def _is_kept(kind: type, numbers: Iterable[Any]) -> bool:
    if kind is torch.Tensor:
        return all(
            number.dtype is torch.int64 and number.dim() == 0 and number.device.type == "cpu" for number in numbers
        )
    return kind is int or (issubclass(kind, np.integer) and kind is not np.uint64)
