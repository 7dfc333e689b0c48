"""Splits streams (loaders of an `IterableDataset`) over the ranks, and ends them together in evaluation.

The contract of a data set: a method ``shard(num_shards, index)`` that returns a data set of that part, as those of
Hugging Face have; or an attribute ``shards_itself``: True if its iterator finds the rank and reads its own part, False
if each rank is to read all of it.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from .clone_loader import clone_loader
from .shards import ends_with_one_source, num_shards_of, why_not_dealable

__all__ = [
    "UnevenEvalLoader",
    "check_made_for",
    "check_not_read_whole",
    "check_own_part",
    "check_script_makes_none",
    "shard_of",
]

_MOSAICML = "streaming"
_SHARD_THEMSELVES = ("litdata", _MOSAICML, "webdataset")
"""Packages whose data sets detect the rank; or, like webdataset's without a `nodesplitter`, refuse several ranks."""

_BY_ENVIRONMENT = """\
{name} reads as rank {rank} of {size}, but this process is rank {part} of {num_parts} of the run. MosaicML's streams
read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE when they are created. `polyphase launch` and torchrun set these:
start the run with one of them, as in `polyphase launch --nproc N -- script.py`. Or, under a strategy without a suffix
such as _fork, create the data set in `train_dataloader()` or `setup()`, where the ranks have these variables. If ranks
compute together (tensor parallelism), `replication=` says how many read the same samples."""

_BEFORE_LAUNCH = """\
{name} was created before the {num_ranks} ranks of this run, which start by running the script again: each of them would
create it before they are connected, but MosaicML's streams connect the ranks when they are created. Create it in
`train_dataloader()` or `setup()`, which run in each rank; or start the script with `polyphase launch --nproc N --
script.py` or torchrun."""

_BY_COUNT = """\
The shards of {name} would be split over {num_ranks} ranks, and its `{counts}` counts only the samples of one rank's
shards: the ranks together would read other samples than one process does. Choose them by files (data_files=[...]), or
by a column (`filter` without indices); or create a data set with a length, as `Dataset.from_list(list(stream.take(n)))`
does; or let each rank take its own, as `split_dataset_by_node(stream, rank, {num_ranks}).take(n)` does."""

_BY_SOURCE = """\
{name} mixes sources until one of them ends, and each of the {num_ranks} ranks mixes its own shards of them: together
they read other samples in an epoch than one process does. `interleave_datasets(...,
stopping_strategy="all_exhausted_without_replacement")` reads each sample once, on any number of ranks."""

_AMONG_ALL = """\
{name} splits itself over all {num_ranks} ranks, but the samples of this run are split over {num_parts}: ranks that
compute together read the same ones. Give it a method `shard(num_shards, index)` that returns a data set of one part,
instead of detecting the rank; or set `shards_itself = False` on it if every rank reads all of it."""


_READ_WHOLE = """\
Each of the {num_ranks} ranks would read all of {name}, so that its samples would count {num_ranks} times: {remedy}.
Or set an attribute on it: `shards_itself = True` if it reads a part of its own on each rank, `shards_itself = False` if
each rank is to read all of it."""


def check_not_read_whole(data: object, num_parts: int, remedy: str) -> None:
    """Checks that several ranks don't read the same samples, unless the user has said so.

    Args:
        data: a data set or loader that the engine can't split over ranks.
        num_parts: number of ranks with different samples.
        remedy: how it can be split.

    Raises:
        ValueError: there are several ranks, and `data` has no ``shards_itself``.
    """
    if num_parts > 1 and not isinstance(getattr(data, "shards_itself", None), bool):
        raise ValueError(_READ_WHOLE.format(num_ranks=num_parts, name=type(data).__name__, remedy=remedy))


def check_own_part(loader: Any, num_parts: int, part: int, num_ranks: int) -> None:
    """Checks that a data set that shards itself takes the part of this rank.

    Args:
        loader: loader of any kind.
        num_parts: number of ranks with different samples.
        part: the index of this rank among them.
        num_ranks: number of all ranks.

    Raises:
        ValueError: samples would be left out, or ranks that compute together would read different samples.
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


def check_made_for(data: Iterable[Any], num_parts: int) -> None:
    """Checks that MosaicML's streams that were created before the ranks start have the right number of ranks.

    Args:
        data: data sets and loaders; other objects are ignored.
        num_parts: the number of ranks with different samples.

    Raises:
        ValueError: one of them has another number of ranks.
    """
    for candidate in data:
        stream: Any = candidate.dataset if isinstance(candidate, DataLoader) else candidate
        # Only these are asked: other objects may be anything.
        world = stream._parallel_rank_world if _is_of(stream, _MOSAICML) else None
        if world is not None and world.num_ranks != num_parts > 1:
            names = {"rank": world.rank, "size": world.num_ranks, "part": 0, "num_parts": num_parts}
            raise ValueError(_BY_ENVIRONMENT.format(name=type(stream).__name__, **names))


def check_script_makes_none(num_ranks: int) -> None:
    """Checks that no MosaicML stream exists, before the other ranks run the script from its beginning.

    A stream that the script creates before the launch would be created in processes that are not connected yet: it
    would wait for the others, or fail with a FileExistsError.

    Args:
        num_ranks: number of ranks of the run.

    Raises:
        ValueError: there is one, even if the run would not read it.
    """
    kind = getattr(sys.modules.get(_MOSAICML), "StreamingDataset", None)
    if num_ranks == 1 or kind is None:
        return
    for candidate in gc.get_objects():  # it may be anywhere: in the module, in a variable of a function
        if kind in type(candidate).__mro__:
            raise ValueError(_BEFORE_LAUNCH.format(name=type(candidate).__name__, num_ranks=num_ranks))


def _is_of(data: Any, *packages: str) -> bool:
    """Whether the class of `data`, or one of its bases, is of one of these packages; no package is imported."""
    return any(cls.__module__.partition(".")[0] in packages for cls in type(data).__mro__)


def _shards_itself(data: Any) -> bool:
    if isinstance(declared := getattr(data, "shards_itself", None), bool):
        return declared
    if getattr(data, "_distributed", None) is not None:  # Hugging Face's
        return True
    return _is_of(data, *_SHARD_THEMSELVES)


def shard_of(loader: DataLoader, num_shards: int, index: int) -> DataLoader | None:
    """Returns a loader of one rank's part of the stream; None if every rank reads all of it.

    Args:
        loader: the user's; it is returned if its data set shards itself.
        num_shards: number of ranks.
        index: this rank.

    Raises:
        ValueError: the data set has fewer shards (`num_shards`) than there are ranks, or counts samples within each
            shard, so that the shards together have other samples than the whole.
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
    if num_shards > 1 and (counts := why_not_dealable(dataset)) is not None:
        raise ValueError(_BY_COUNT.format(name=type(dataset).__name__, num_ranks=num_shards, counts=counts))
    if num_shards > 1 and ends_with_one_source(dataset):
        rank_zero_warn(_BY_SOURCE.format(name=type(dataset).__name__, num_ranks=num_shards))
    return clone_loader(loader, dataset=dataset.shard(num_shards=num_shards, index=index))


class UnevenEvalLoader(DataLoader):
    """An evaluation loader that ends at the same batch as those of the other ranks; made by `clone_loader`.

    Before each batch the ranks gather whether they have one left. A rank without one repeats its last batch, as a
    *padding batch* that it runs for its collectives only, until no rank has any. The first `num_real` are not padding.
    """

    all_gather_bools: Callable[[bool], list[bool]]
    """Takes this rank's flag and returns those of all ranks, in rank order; all ranks call it together."""
    length: int | None
    """The largest number of batches of a rank; None if some rank does not know its own."""
    num_real = num_real_of_all = math.inf
    """The number of batches that no rank has padding for; infinite until a rank has none left."""

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{type(self).__name__} over an IterableDataset has no length on every rank")
        return self.length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_real = self.num_real_of_all = math.inf
        return self._together(super().__iter__())

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing, num_batches = object(), 0
        num_yielded = 0
        latest = batch = next(batches, nothing)
        have_batch = self.all_gather_bools(batch is not nothing)
        if any(have_batch) and not all(have_batch):
            raise ValueError(
                f"An IterableDataset ({type(self.dataset).__name__}) has no batch at all on rank(s)"
                f" {[rank for rank, has in enumerate(have_batch) if not has]} of {len(have_batch)}, which need one to"
                " take part in the evaluation: give each rank some of it, or use fewer ranks or smaller batches."
            )
        while any(have_batch):
            if batch is not nothing:
                latest, num_batches = batch, num_batches + 1
            elif math.isinf(self.num_real):
                self.num_real = num_batches
            if not all(have_batch):
                self.num_real_of_all = min(self.num_real_of_all, num_yielded)
            num_yielded += 1
            yield latest
            batch = next(batches, nothing) if batch is not nothing else nothing
            have_batch = self.all_gather_bools(batch is not nothing)
