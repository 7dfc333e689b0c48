"""Random training runs by number: which data, where the run stops, how it goes on."""

import random
from dataclasses import dataclass, replace

from .kinds import COMBINED, IN_ONE_PROCESS, KINDS, STREAMS, STRUCTURES

STOPS = ("max_steps", "should_stop", "exception", "save")


@dataclass(frozen=True)
class Draw:
    """One training run, where it stops, and how it goes on."""

    kind: str
    num_samples: int
    batch_size: int
    drop_last: bool
    structure: str
    num_workers: int
    persistent: bool
    accumulate: int
    limit: int | None
    """`limit_train_batches`."""
    stop: str
    stop_after: int
    """Batches of this rank."""
    num_ranks: int
    later_batch_size: int
    later_num_workers: int
    later_num_ranks: int
    reload: int = 0
    """`reload_dataloaders_every_n_epochs`."""

    @property
    def keeps_batches(self) -> bool:
        """Whether the batches after the stop are to be those of the run that is not stopped."""
        later = self.later_batch_size, self.later_num_ranks
        is_same_crew = self.kind not in STREAMS or self.later_num_workers == self.num_workers
        if self.kind == "StatefulDataLoader, shuffle":  # torchdata draws other orders with workers than without
            is_same_crew = bool(self.later_num_workers) == bool(self.num_workers)
        return later == (self.batch_size, self.num_ranks) and is_same_crew and not self.reads_ahead_otherwise

    @property
    def reads_ahead_otherwise(self) -> bool:
        """Whether workers of one of the two runs draw an order for the iterator of a new loader that is not used."""
        return bool(self.reload) and bool(self.num_workers) != bool(self.later_num_workers)


def draw(seed: int, number: int, most_ranks: int = 1) -> Draw:
    """The draw of that number; independent of the others, and of how many ranks are allowed but for their numbers."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choice(list(KINDS))
    batch_size, num_workers = rng.randint(1, 5), rng.choice([0] * 8 + [1, 2])
    ranks = [rng.randint(1, 4) for _ in range(2)]
    alike = rng.random() < 0.5
    found = Draw(
        kind=kind,
        num_samples=rng.randint(6, 40),
        batch_size=batch_size,
        drop_last=rng.random() < 0.3,
        structure=rng.choice(list(STRUCTURES)),
        num_workers=num_workers,
        persistent=num_workers > 0 and rng.random() < 0.5,
        accumulate=rng.choice([1, 1, 2, 3]),
        limit=rng.choice([None, None, None, rng.randint(2, 6)]) if alike else None,
        stop=rng.choice(STOPS),
        stop_after=rng.randint(1, 12),
        num_ranks=min(ranks[0], most_ranks),
        later_batch_size=batch_size if alike or rng.random() < 0.6 else rng.randint(1, 5),
        later_num_workers=num_workers if alike else rng.choice([num_workers, num_workers, num_workers, 0, 1, 2]),
        later_num_ranks=min(ranks[0] if alike else ranks[1], most_ranks),
        reload=rng.choice([0, 0, 0, 1, 2]),
    )
    if kind == "stream with state_dict":
        # It begins an epoch where a limit has ended the one before: for one of several ranks that may be at its end.
        found = replace(found, limit=None)
    if kind in IN_ONE_PROCESS:
        found = replace(found, num_ranks=1, later_num_ranks=1)
    if kind in COMBINED:
        # Workers ask a sampler for its order before the next loader is there, so that an order of two loaders depends
        # on whether there are any. What a loader drops depends on the size of a batch of all ranks.
        drops = found.drop_last and found.num_ranks == found.later_num_ranks
        drops = drops and found.num_ranks * batch_size <= found.num_samples
        found = replace(found, later_batch_size=batch_size, later_num_workers=num_workers, drop_last=drops)
        if number % 4:  # all numbers of ranks divide the samples of either loader; what they can't share is refused
            found = replace(found, num_samples=24)
    return found
