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
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["GlobalOrder"]

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
        self.sampler_state: Any = None
        """State of the sampler's own generator, or of a sampler that has one, as the epoch began; None for neither."""
        self._order: Any = None
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
            num_done: number of samples of this rank's that count as done; `len` includes them.
            sampler_state: what the attribute was in the run that is resumed.
        """
        self._bring_to(epoch, sampler_state)
        self.set_epoch(epoch)
        self._start, self._num_done, self._resumes = position, num_done, True

    @property
    def num_repeated(self) -> int:
        """Samples that are dealt twice, so that all ranks have as many."""
        size = len(self.sampler)  # type: ignore[arg-type]
        return 0 if self.drop_last else -size % self.num_replicas

    def __len__(self) -> int:
        return self._num_done + self._rounds(self._start)

    def __iter__(self) -> Iterator[Any]:
        order = self.global_order()
        # Only the first pass begins in the middle: a shorter loader beside a longer one may pass again in an epoch.
        start, self._resumes = self._start if self._resumes else 0, False
        rest = itertools.islice(itertools.cycle(order), start, start + self._rounds(start) * self.num_replicas)
        # Every rank needs as many samples as the others, since they meet at each step.
        return itertools.islice(rest if order else iter(()), self.rank, None, self.num_replicas)

    def _rounds(self, start: int) -> int:
        size = max(0, len(self.sampler) - start)  # type: ignore[arg-type]
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def global_order(self) -> Any:
        """The order of this epoch, of all ranks together."""
        if self._order is None:
            self.sampler_state = _state_of(self.sampler)
            # A sampler without a generator of its own draws from the global ones, which are left as they were.
            with _seeded(_mix(self.seed, self.epoch)):
                self._order = _compact(list(self.sampler))
            self._digested = (0, 0)
        return self._order

    def digest(self, position: int) -> int:
        """A checksum of the epoch's order up to a position."""
        order = self.global_order()
        at, crc = self._digested if self._digested[0] <= position else (0, 0)
        part = order[at:position]
        crc = zlib.crc32(part.tobytes() if isinstance(part, array) else "".join(map(repr, part)).encode(), crc)
        self._digested = (position, crc)
        return crc

    def _bring_to(self, epoch: int, sampler_state: Any) -> None:
        """Has a sampler that remembers its draws remember those of the epochs before."""
        if sampler_state is not None:
            _set_state_of(self.sampler, sampler_state)
        elif not isinstance(self.sampler, _TORCHS_OWN) and not hasattr(self.sampler, "set_epoch"):
            for earlier in range(epoch):
                with _seeded(_mix(self.seed, earlier)):
                    list(self.sampler)


def _compact(order: list[Any]) -> Any:
    """In 8 bytes an item where they are numbers, since it is kept for an epoch."""
    return array("q", order) if all(type(item) is int for item in order) else order


def _state_of(sampler: Any) -> Any:
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return sampler.generator.get_state()
    return sampler.state_dict() if hasattr(sampler, "state_dict") else None


def _set_state_of(sampler: Any, state: Any) -> None:
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state)
    else:
        sampler.load_state_dict(state)


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


def _mix(seed: int, epoch: int) -> int:
    """A seed per seed and epoch; neighbouring seeds do not share permutations an epoch apart."""
    return hash((seed, epoch)) % 2**63  # a hash of integers is the same in every process
