"""The order of one pass over a sampler: drawn bit by bit as stock draws it, remembered, and drawn again by another run.

A sampler draws from a generator of its own, or from the global ones. Their states right before a pass are all that
another run needs to draw the same order: `Drawing.before`, which a checkpoint has, and which rank 0 hands on.
"""

import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import sampler as torchdatas

from ..checkpoint.rng import get_random_state, of_host, seed_all, set_random_state
from .compact_order import CompactOrder

__all__ = [
    "Drawing",
    "Passes",
    "Record",
    "bring_to",
    "generator_of",
    "is_same_state",
    "left_alone",
    "state_before",
    "state_of",
]

_IN_ORDER = (SequentialSampler, list, tuple, range)
_TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, torchdatas.RandomSampler)
"""Samplers that draw from torch's generators alone, and after their first item from one of their own."""


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator that the user gave to a sampler, or to the one within a batch sampler."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(found := getattr(owner, "generator", None), torch.Generator):
            return found
    return None


def state_of(sampler: Any) -> Any:
    """State of a sampler that has one, else of its own generator; None without either."""
    if hasattr(sampler, "load_state_dict"):
        return sampler.state_dict()
    generator = generator_of(sampler)
    return None if generator is None else generator.get_state()


def _set_state(sampler: Any, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        _set_generator(sampler, state)
    elif state is not None and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state)


def _set_generator(sampler: Any, state: Any) -> None:
    generator = generator_of(sampler)
    if generator is not None and isinstance(state, torch.Tensor):
        generator.set_state(state)


def state_before(sampler: Any) -> dict[str, Any]:
    """All that the next pass over `sampler` draws from, plain values: of the global generators, and of its own."""
    return {"global": _global_state(sampler), "sampler": state_of(sampler)}


def _global_state(sampler: Any) -> dict[str, Any] | None:
    if type(sampler) in _IN_ORDER or (type(sampler) in _TORCHS and generator_of(sampler) is not None):
        return None
    if type(sampler) in _TORCHS:
        return {"torch": torch.get_rng_state()}
    return of_host(get_random_state())


def _set_global(state: dict[str, Any] | None) -> None:
    if state is not None:
        set_random_state({**get_random_state(), **state})


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of generators are equal."""
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(is_same_state(state[name], other[name]) for name in state)
    return bool(state == other)


@contextmanager
def left_alone(sampler: Any) -> Iterator[None]:
    """Restores the global generators, and the sampler's own, at the end, whatever is drawn within."""
    before = state_before(sampler)
    try:
        yield
    finally:
        _set_global(before["global"])
        _set_state(sampler, before["sampler"])


def bring_to(sampler: Any, num_passes: int, state: Any) -> None:
    """Brings a sampler to where it was after so many passes.

    Args:
        sampler: a new one.
        num_passes: how many there were; one that only remembers its draws does them again.
        state: what `state_of` said then.
    """
    own = generator_of(sampler) is not None or hasattr(sampler, "load_state_dict") or hasattr(sampler, "set_epoch")
    if num_passes and not own and type(sampler) not in _IN_ORDER + _TORCHS:
        everything = get_random_state()
        for _ in range(num_passes):
            indices = iter(sampler)
            list(itertools.islice(indices, len(sampler)))
            next(indices, None)  # it may draw, or count its passes, at its end
        set_random_state(everything)
    _set_state(sampler, state)


def state_of_seed(seed: int, epoch: int, sampler_state: Any) -> dict[str, Any]:
    """`GlobalOrder.state` for a checkpoint of version 0.1.0, whose order depends on the seed and the epoch alone."""
    everything = get_random_state()
    seed_all(seed, epoch)
    drawn_from = of_host(get_random_state())
    set_random_state(everything)
    before = {"global": drawn_from, "sampler": sampler_state}
    return {"before": before, "sampler": sampler_state, "whole": True, "num_passes": epoch}


_BLOCK = 2**14
"""Items that are drawn at once at most, where they are drawn one by one: as Python integers they are large."""


class Record:
    """The items that one pass over a sampler has yielded so far.

    Args:
        before: `state_before` the pass; None until it is known.
    """

    def __init__(self, before: dict[str, Any] | None = None) -> None:
        self.before = before
        self.order: Any = array("q")  # 8 bytes a number, since it is kept for an epoch; else a list
        self._digested = (0, 0)

    def add(self, items: Any) -> None:
        """Remembers the next items, a list or an array of integers."""
        are_integers = isinstance(items, array) or set(map(type, items)) <= {int}
        if not len(self.order):
            if isinstance(items, array):
                self.order = items  # a permutation of all samples; it is large, and nobody else has it
                return
            self.order = array("q") if are_integers else CompactOrder()
        fits = self.order.fits(items) if isinstance(self.order, CompactOrder) else are_integers
        if not fits and not isinstance(self.order, list):
            self.order = list(self.order)
        self.order.extend(items)

    def digest(self, position: int) -> int:
        """A checksum of the order up to a position."""
        at, crc = self._digested if self._digested[0] <= position else (0, 0)
        if isinstance(self.order, array):
            crc = zlib.crc32(memoryview(self.order)[at:position], crc)
        else:
            for start in range(at, position, _BLOCK):
                block = self.order[start : min(start + _BLOCK, position)]
                crc = zlib.crc32("".join(map(repr, block)).encode(), crc)
        self._digested = (position, crc)
        return crc


def _blocks_of(sampler: Any) -> Callable[[int], Any]:
    """Draws the next items of a pass: about as many as it is asked for, none at the end."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        permutations = _permutations(sampler)
        return lambda _: next(permutations, None)
    indices = iter(sampler)
    return lambda size: list(itertools.islice(indices, size))


def _permutations(sampler: RandomSampler) -> Iterator["array[int]"]:
    """The order that `sampler` draws, whose own iterator has it as Python integers, of five times the memory.

    Follows torch's `RandomSampler.__iter__`, draw by draw.
    """
    generator, size = sampler.generator, len(sampler.data_source)
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // size):
        yield _permutation(size, generator)
    rest = sampler.num_samples % size
    if rest or sampler.generator is not None:  # torch draws it for nothing too, which a user's generator shows
        yield _permutation(size, generator)[:rest]


def _permutation(size: int, generator: torch.Generator) -> "array[int]":
    indices = array("q", [0]) * size
    torch.randperm(size, generator=generator, out=torch.frombuffer(indices, dtype=torch.int64))
    return indices


class Drawing(Record):
    """A pass over a sampler by ourselves.

    Args:
        sampler: whose.
        whole: draw all of it at once where the sampler is none of torch's: several ranks, whose random numbers differ
            from step to step, can have only one order that way.
        before: from which to draw again, leaving the global generators alone; None: from where they are.
        hand_on: gives all ranks what the first of them gives; None where there is one process.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        whole: bool = False,
        before: dict[str, Any] | None = None,
        hand_on: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(before)
        self.sampler = sampler
        self.at = 0
        """Position of the next item to take."""
        self.is_whole = whole and type(sampler) not in _IN_ORDER + _TORCHS
        self._is_again = before is not None
        self._hand_on = hand_on
        self._blocks: Callable[[int], Any] | None = None
        self._after: Any = None
        self._global_after: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": None, "_hand_on": None}

    def up_to(self, end: int) -> Any:
        """The order, of which at least the first `end` items are drawn, if it has as many."""
        end = min(end, len(self.sampler))  # type: ignore[arg-type]
        if end > len(self.order) and self._blocks is None:
            with self._generators():
                self._blocks = _blocks_of(self.sampler)
                self._pull(len(self.sampler) if self.is_whole else end)  # type: ignore[arg-type]
        elif end > len(self.order):
            self._pull(end)
        return self.order

    def take(self, size: int) -> list[Any]:
        """The next items, fewer at the end."""
        items = list(self.up_to(self.at + size)[self.at : self.at + size])
        self.at += len(items)
        if len(items) < size and self._blocks is not None:
            self._blocks(1)  # whoever asks for more runs into the end, where a generator may draw once more
        return items

    def go_on(self) -> None:
        """Called before items are taken: what a DataLoader drew since from the same generator comes before them."""
        _set_generator(self.sampler, self._after)
        self._after = None

    def settle(self) -> None:
        """Called when the global generators are where the saved run's were: has them draw the order if it had not yet.

        Loaders with workers ask for the order before that, and others when the first batch is fetched.
        """
        before, after = (self.before or {}).get("global"), self._global_after
        if before is not None and after is not None and is_same_state(before, _global_state(self.sampler)):
            _set_global(after)

    def end_with(self, state: Any) -> None:
        """Says that the pass is over, and what state its sampler was left in."""
        self._blocks = lambda _: []
        _set_state(self.sampler, state)

    def _pull(self, end: int) -> None:
        assert self._blocks is not None
        while len(self.order) < end and (block := self._blocks(min(end - len(self.order), _BLOCK))):
            self.add(block)

    @contextmanager
    def _generators(self) -> Iterator[None]:
        here = state_before(self.sampler)
        if self.before is None:
            has_none = here["global"] is None and here["sampler"] is None
            self.before = here if self._hand_on is None or has_none else self._hand_on(here)
        is_own = is_same_state(self.before["global"], here["global"])
        if not is_own:
            _set_global(self.before["global"])
        if not is_own or not is_same_state(self.before["sampler"], here["sampler"]):
            _set_state(self.sampler, self.before["sampler"])
        try:
            yield
        finally:
            # Ranks that draw the same random numbers go on to; the others are left where they were.
            if not is_own:
                self._global_after = _global_state(self.sampler)
                _set_global(here["global"])
            self._after = state_of(self.sampler) if self._is_again else None


class Passes:
    """The passes over one sampler in an epoch: a shorter loader beside a longer one begins again.

    The last two are kept: a checkpoint may be of a batch before the one that is fetched.
    """

    def __init__(self) -> None:
        self.num_before = 0
        """Passes in the epochs before."""
        self._epoch = -1
        self._of_epoch: dict[int, Any] = {}
        self._num = 0

    def begin(self, epoch: int, record: Any, *, replaces_latest: bool = False) -> None:
        """Notes a pass that begins, or that takes the place of the latest, of which nothing was read."""
        if replaces_latest and epoch == self._epoch:
            self._of_epoch[self._num - 1] = record
            return
        if epoch != self._epoch:
            self.num_before += self._num
            self._epoch, self._num = epoch, 0
            self._of_epoch.clear()
        self._of_epoch[self._num] = record
        self._of_epoch.pop(self._num - 2, None)
        self._num += 1

    def begin_again(self, epoch: int) -> None:
        """Counts the passes of an epoch so far among those before it: it is read anew, from another iterator."""
        if epoch == self._epoch:
            self.num_before += self._num
            self._num = 0
            self._of_epoch.clear()

    def resume(self, num_before: int) -> None:
        """Sets the number of passes that went before those of the epoch that is resumed."""
        self.num_before = num_before

    def num_until(self, epoch: int, number: int) -> int:
        """Passes that went before one of an epoch, those of the epochs before among them."""
        return self.num_before + (number if epoch == self._epoch else self._num)

    def of(self, epoch: int, number: int) -> Any:
        """The pass of that number in an epoch; None if it has not begun, or is too long ago."""
        return self._of_epoch.get(number) if epoch == self._epoch else None

    @property
    def latest(self) -> Any:
        """The last one that has begun; None without any."""
        return self._of_epoch.get(self._num - 1)
