"""Streams, that is loaders of an `IterableDataset`, read by several ranks: which part is whose, and where all end.

The contract of a data set: a method ``shard(num_shards, index)`` that returns a data set of that part, as Hugging
Face's have it; or an attribute ``shards_itself = True`` where its iterator finds out the rank and reads its own part.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from .copied import copied
from .shards import num_shards_of

__all__ = ["Agreeing", "agreeing", "check_own_part", "shard_of"]

_SHARD_THEMSELVES = ("litdata", "streaming", "webdataset")
"""Packages whose data sets find out the rank; or, like webdataset's without a `nodesplitter`, refuse several."""

_BY_ENVIRONMENT = """\
{name} takes this process for rank {rank} of {size}, where the run has rank {part} of {num_parts}: MosaicML's streams
read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which `polyphase launch` and torchrun set: start the run with
one of them. Where ranks compute together (tensor parallelism), `replication=` says how many read the same samples."""

_AMONG_ALL = """\
{name} shares itself out among all {num_ranks} ranks, where the samples of this run are shared out among {num_parts}:
ranks that compute together read the same ones. Give it a method `shard(num_shards, index)` that returns a data set of
one part, in place of finding out the rank; or set `shards_itself = False` on it if every rank reads all of it."""


def check_own_part(loader: Any, num_parts: int, part: int, num_ranks: int) -> None:
    """Checks that a data set that finds out its part does not take another one than this rank is to have.

    Args:
        loader: of any kind.
        num_parts: the ranks that have samples of their own.
        part: this rank's place among them.
        num_ranks: all ranks of the run.

    Raises:
        ValueError: samples would be left out, or ranks that compute together would read different ones.
    """
    data = getattr(loader, "dataset", loader)
    if num_ranks == 1 or not _shards_itself(data):
        return
    name = type(data).__name__
    world = getattr(data, "_parallel_rank_world", None)  # MosaicML's StreamingDataset
    if world is not None and (world.num_ranks, world.rank) != (num_parts, part):
        names = {"rank": world.rank, "size": world.num_ranks, "part": part, "num_parts": num_parts}
        raise ValueError(_BY_ENVIRONMENT.format(name=name, **names))
    theirs = getattr(data, "_distributed", None)  # Hugging Face's, after `split_dataset_by_node`
    takes_it = theirs is not None and (theirs.world_size, theirs.rank) == (num_parts, part)
    if world is None and not takes_it and num_parts < num_ranks:
        raise ValueError(_AMONG_ALL.format(name=name, num_ranks=num_ranks, num_parts=num_parts))


def _shards_itself(data: Any) -> bool:
    if isinstance(said := getattr(data, "shards_itself", None), bool):
        return said
    if getattr(data, "_distributed", None) is not None:  # Hugging Face's
        return True
    return any(cls.__module__.partition(".")[0] in _SHARD_THEMSELVES for cls in type(data).__mro__)


def shard_of(loader: DataLoader, num_shards: int, index: int) -> DataLoader | None:
    """A loader of one rank's part of the stream; None where every rank would read all of it.

    Args:
        loader: the user's; returned as it is where its data set sees to its part itself.
        num_shards: number of ranks.
        index: this rank.

    Raises:
        ValueError: the data set says that it has fewer shards (`num_shards`) than there are ranks.
    """
    dataset: Any = loader.dataset
    if _shards_itself(dataset):
        return loader
    if not callable(getattr(dataset, "shard", None)):
        return None
    has = num_shards_of(dataset)
    if has is not None and has < num_shards:
        raise ValueError(
            f"{type(dataset).__name__} has {has} shard(s), which {num_shards} ranks can't share: give it as many"
            " (num_shards, or more files), use fewer ranks, or Hugging Face's `split_dataset_by_node`."
        )
    return copied(loader, dataset=dataset.shard(num_shards=num_shards, index=index))


class Agreeing(DataLoader):
    """A loader that ends together with those of the other ranks.

    At each batch the ranks say whether they have one left. One that has none gets its last batch again, as a *ghost*
    to be run for its collectives only, until nobody has any. `num_real` says from which batch on.
    """

    agree: Callable[[bool], list[bool]]
    """Gathers a flag of each rank: takes this rank's and returns all, in rank order; all ranks call it together."""
    length: int | None
    """The largest number of batches of a rank; None if one of them doesn't know."""
    num_real: float

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{type(self).__name__} over an IterableDataset has no length on every rank")
        return self.length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_real = math.inf
        return self._together(super().__iter__())

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing, num_batches = object(), 0
        latest = batch = next(batches, nothing)
        has_one = self.agree(batch is not nothing)
        if any(has_one) and not all(has_one):
            raise ValueError(
                f"An IterableDataset ({type(self.dataset).__name__}) has no batch at all on rank(s)"
                f" {[rank for rank, has in enumerate(has_one) if not has]} of {len(has_one)}, which need one to take"
                " part in the evaluation: give each rank some of it, or use fewer ranks or smaller batches."
            )
        while any(has_one):
            if batch is not nothing:
                latest, num_batches = batch, num_batches + 1
            elif math.isinf(self.num_real):
                self.num_real = num_batches
            yield latest
            batch = next(batches, nothing) if batch is not nothing else nothing
            has_one = self.agree(batch is not nothing)


def agreeing(loader: DataLoader, agree: Callable[[bool], list[bool]], length: int | None) -> Agreeing:
    """A copy of a loader, of a subclass of its class, that ends together with those of the other ranks."""
    return copied(loader, Agreeing, agree=agree, length=length, num_real=math.inf)
