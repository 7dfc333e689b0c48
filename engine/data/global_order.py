"""One order of samples for all ranks, dealt round-robin.

Position i of the epoch's order belongs to rank i mod W. So W ranks with batches of b samples train, step by step, on
the same samples as one process with batches of W*b.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DistributedSampler, RandomSampler

__all__ = ["GlobalOrder"]


class GlobalOrder(DistributedSampler[int]):
    """This rank's part of the order that `sampler` yields.

    A `DistributedSampler` to whoever asks, with its attributes; none of its code is used.

    Args:
        sampler: the order of one process: the DataLoader's own sampler. One that draws from torch's global generator
            (`shuffle=True` does) draws from a seed of its own here: one permutation per seed and epoch, the same under
            every strategy. A sampler with a generator of the user's keeps it.
        num_replicas: number of ranks, W.
        rank: this rank, 0 to W-1.
        seed: seed of the job, the same on every rank.
        drop_last: leave out the samples that don't fill a whole round, rather than repeat the first ones.
    """

    def __init__(
        self, sampler: Iterable[int], *, num_replicas: int = 1, rank: int = 0, seed: int = 0, drop_last: bool = False
    ) -> None:
        # Not the constructor of DistributedSampler, which wants a data set and makes an order of its own.
        self.sampler = sampler
        self.shuffle = isinstance(sampler, RandomSampler)
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation; Lightning calls this before each epoch."""
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    @property
    def num_repeated(self) -> int:
        """Samples that are dealt twice, so that all ranks have as many."""
        size = len(self.sampler)  # type: ignore[arg-type]
        return 0 if self.drop_last else -size % self.num_replicas

    def __len__(self) -> int:
        size = len(self.sampler)  # type: ignore[arg-type]
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        order = self._global_order()
        rounds = len(self)
        # Every rank needs as many samples as the others, since they meet at each step.
        filled = itertools.islice(itertools.cycle(order), rounds * self.num_replicas) if order else iter(())
        return itertools.islice(filled, self.rank, None, self.num_replicas)

    def _global_order(self) -> list[int]:
        # A sampler without a generator of its own draws from the global one, which is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_mix(self.seed, self.epoch))
            return list(self.sampler)


def _mix(seed: int, epoch: int) -> int:
    """A seed per seed and epoch; neighbouring seeds do not share permutations an epoch apart."""
    return hash((seed, epoch)) % 2**63  # a hash of integers is the same in every process
