"""One order of samples for all ranks, dealt round-robin, that can be gone on with in mid-epoch.

Position i of the epoch's order belongs to rank i mod W. So W ranks with batches of b samples train, step by step, on
the same samples as one process with batches of W*b; and a run that stopped after position p goes on at p, whatever its
number of ranks and its batch size have become. The order depends on the seed and the epoch alone.
"""

import itertools
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..seeds import mixed

__all__ = ["GlobalOrder", "Samples"]


class Samples(NamedTuple):
    """How many samples a batch has."""

    mine: int
    """On this rank; 0 for one that only fills up."""
    all: int
    """On all ranks together."""


_TORCHS_OWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, range)


class GlobalOrder(DistributedSampler[Any]):
    """This rank's part of the order that `sampler` yields.

    A `DistributedSampler` to whoever asks, with its attributes; none of its code is used.

    Args:
        sampler: the order of one process: the DataLoader's own sampler, or a batch sampler, whose batches are dealt
            then. One that draws from torch's, numpy's or Python's global generator draws from a seed of its own here:
            one permutation per seed and epoch, the same under every strategy. A sampler with a generator of the user's
            keeps it.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        seed: seed of the job, the same on every rank.
        drop_last: leave out the samples that don't fill a whole round, rather than repeat the first ones.
    """

    def __init__(
        self, sampler: Iterable[Any], *, num_replicas: int = 1, rank: int = 0, seed: int = 0, drop_last: bool = False
    ) -> None:
        # Not the constructor of DistributedSampler, which wants a data set and makes an order of its own.
        self.sampler = sampler
        self.shuffle = isinstance(sampler, RandomSampler)
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._order: Any = None
        self._states = _state_of(sampler), None  # of the sampler, before and after it was drawn from
        self._is_new = True
        self._digested = (0, 0)
        self._start = self._num_done = 0
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation; Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self._order = None
            self._start = self._num_done = 0
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def resume(self, epoch: int, position: int, num_done: int, sampler_state: Any = None) -> None:
        """Goes on in mid-epoch.

        Args:
            epoch: the epoch.
            position: number of samples of the order that all ranks together are done with.
            num_done: what counts as done of this rank's part: samples here, which `len` includes; micro-batches in a
                `GlobalBatches`.
            sampler_state: what the method of that name said in the run that is resumed.
        """
        self._bring_to(epoch, sampler_state)
        self.set_epoch(epoch)
        self.go_on_at(position, num_done)

    def go_on_at(self, position: int, num_done: int) -> None:
        """Has the next pass begin in mid-epoch; see `resume`."""
        self._start, self._num_done, self._resumes = position, num_done, True

    def count_done(self, num_done: int) -> None:
        """Says anew how much of this rank's part counts as done."""
        self._num_done = num_done

    @property
    def start(self) -> int:
        """Position in the order at which this run began the epoch."""
        return self._start

    @property
    def num_done(self) -> int:
        """What counts as done of the epoch, in the unit of whoever counted."""
        return self._num_done

    def __len__(self) -> int:
        return self._num_done + self._rounds(len(self.sampler) - self._start)  # type: ignore[arg-type]

    def begin(self) -> tuple[Any, int]:
        """The order of all ranks together for a pass over it, and where in it the pass begins."""
        order = self.global_order()
        if self._resumes:
            # Drawn already, to compare it. What a DataLoader drew since from the same generator comes before the order.
            _set_generator(self.sampler, self._states[1])
        # Only the first pass begins in the middle: a shorter loader beside a longer one may pass again in an epoch.
        start, self._resumes = self._start if self._resumes else 0, False
        return order, start

    def __iter__(self) -> Iterator[Any]:
        order, start = self.begin()
        end = start + self._rounds(len(order) - start) * self.num_replicas
        # Every rank needs as many samples as the others, since they meet at each step: the first ones fill it up.
        return (order[position % len(order)] for position in range(start + self.rank, end, self.num_replicas))

    def _rounds(self, size: int) -> int:
        return max(0, size // self.num_replicas if self.drop_last else -(-size // self.num_replicas))

    def global_order(self) -> Any:
        """The order of this epoch, of all ranks together."""
        if self._order is None:
            before = _state_of(self.sampler)
            # A sampler without a generator of its own draws from the global ones, which are left as they were.
            with _seeded(mixed(self.seed, self.epoch)):
                self._order = _compact(_drawn(self.sampler))
            self._states = before, _state_of(self.sampler)
            self._is_new = False
            self._digested = (0, 0)
        return self._order

    def samples(self, index: int) -> Samples:
        """Of an order of batches: those of this rank's batch of that index in the epoch, and of all ranks' together."""
        order = self.global_order()
        first = self._start + (index - self._num_done) * self.num_replicas
        sizes = [len(batch) for batch in order[first : first + self.num_replicas]]
        return Samples(sizes[self.rank] if self.rank < len(sizes) else 0, sum(sizes))

    def sampler_state(self, epoch: int) -> Any:
        """State of the sampler's own generator, or of a sampler that has one, as `epoch` begins; None for neither.

        Args:
            epoch: the present one, or the one after it.
        """
        is_drawn = self._order is not None and epoch == self.epoch
        return self._states[0] if is_drawn or self._is_new else _state_of(self.sampler)

    def digest(self, position: int) -> int:
        """A checksum of the epoch's order up to a position."""
        if position == 0:
            return 0  # and nothing is drawn for it, which would be too early
        order = self.global_order()
        at, crc = self._digested if self._digested[0] <= position else (0, 0)
        part = order[at:position]
        crc = zlib.crc32(part.tobytes() if isinstance(part, array) else "".join(map(repr, part)).encode(), crc)
        self._digested = (position, crc)
        return crc

    def _bring_to(self, epoch: int, sampler_state: Any) -> None:
        """Has a sampler that remembers its draws remember those of the epochs before."""
        self._order = None
        has_state = hasattr(self.sampler, "load_state_dict")
        if not (has_state or type(self.sampler) in _TORCHS_OWN or hasattr(self.sampler, "set_epoch")):
            for earlier in range(epoch):
                with _seeded(mixed(self.seed, earlier)):
                    _drawn(self.sampler)
        if has_state and sampler_state is not None and not isinstance(sampler_state, torch.Tensor):
            self.sampler.load_state_dict(sampler_state)  # type: ignore[attr-defined]
        else:
            _set_generator(self.sampler, sampler_state)
        self._states, self._is_new = (_state_of(self.sampler), None), True


def _drawn(sampler: Iterable[Any]) -> list[Any]:
    indices = iter(sampler)
    order = list(itertools.islice(indices, len(sampler)))  # type: ignore[arg-type]
    next(indices, None)  # a generator may draw once more at its end
    return order


def _compact(order: list[Any]) -> Any:
    """In 8 bytes an item where they are numbers, since it is kept for an epoch."""
    return array("q", order) if all(type(item) is int for item in order) else order


def _generator(sampler: Any) -> torch.Generator | None:
    """The generator that the user gave to a sampler, or to the one within a batch sampler."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(found := getattr(owner, "generator", None), torch.Generator):
            return found
    return None


def _state_of(sampler: Any) -> Any:
    if hasattr(sampler, "load_state_dict"):
        return sampler.state_dict()
    generator = _generator(sampler)
    return None if generator is None else generator.get_state()


def _set_generator(sampler: Any, state: Any) -> None:
    generator = _generator(sampler)
    if generator is not None and isinstance(state, torch.Tensor):
        generator.set_state(state)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
