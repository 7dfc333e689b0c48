"""Splits streams (loaders of an `IterableDataset`) over the ranks, and ends them together in evaluation.

The contract of a data set: a method ``shard(num_shards, index)`` that returns a data set of that part, as those of
Hugging Face have; or an attribute ``shards_itself = True`` if its iterator finds the rank and reads its own part.
"""

import gc
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from .clone_loader import clone_loader
from .shards import ends_with_one_source, num_shards_of, why_not_dealable

__all__ = [
    "UnevenEvalLoader",
    "as_uneven_eval",
    "check_made_for",
    "check_own_part",
    "check_script_makes_none",
    "naming_foreign_ranks",
    "shard_of",
]

_MOSAICML = "streaming"
_SHARD_THEMSELVES = ("litdata", _MOSAICML, "webdataset")
"""Packages whose data sets find out the rank; or, like webdataset's without a `nodesplitter`, refuse several."""

_BY_ENVIRONMENT = """\
{name} takes this process for rank {rank} of {size}, where the run has rank {part} of {num_parts}: MosaicML's streams
read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE when they are made, which `polyphase launch` and torchrun set:
start the run with one of them, as in `polyphase launch --nproc N -- script.py`. Or, under a strategy without a suffix
such as _fork, make the data set in `train_dataloader()` or `setup()`, where the ranks have these variables. Where ranks
compute together (tensor parallelism), `replication=` says how many read the same samples."""

_BEFORE_LAUNCH = """\
{name} was made before the {num_ranks} ranks of this run, which start by running the script once more: it can't be made
in each of them before they are connected, since MosaicML's streams connect the ranks when they are made. Make it in
`train_dataloader()` or `setup()`, which run in each rank; or start the script by `polyphase launch --nproc N --
script.py` or torchrun."""

_BY_COUNT = """\
The shards of {name} would be dealt to {num_ranks} ranks, and its `{counts}` counts the samples of each rank's shards
alone: the ranks together would read other samples than one process does. Choose them by files (data_files=[...]), or by
a column (`filter` without indices); or make a data set with a length, as by `Dataset.from_list(list(stream.take(n)))`;
or let each rank take its own, as by `split_dataset_by_node(stream, rank, {num_ranks}).take(n)`."""

_BY_SOURCE = """\
{name} mixes sources until one of them ends, and each of the {num_ranks} ranks mixes its own shards of them: together
they read other samples in an epoch than one process does. `interleave_datasets(...,
stopping_strategy="all_exhausted_without_replacement")` reads each sample once, on any number of ranks."""

_AMONG_ALL = """\
{name} shares itself out among all {num_ranks} ranks, where the samples of this run are shared out among {num_parts}:
ranks that compute together read the same ones. Give it a method `shard(num_shards, index)` that returns a data set of
one part, in place of finding out the rank; or set `shards_itself = False` on it if every rank reads all of it."""


def check_own_part(loader: Any, num_parts: int, part: int, num_ranks: int) -> None:
    """Checks that a data set that shards itself takes the part of this rank.

    Args:
        loader: of any kind.
        num_parts: number of ranks that have samples of their own.
        part: the number of this rank among them.
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
    """Checks that MosaicML's streams that were made before the ranks are there know how many there will be.

    Args:
        data: data sets and loaders; what else there is among them is left alone.
        num_parts: the ranks that will have samples of their own.

    Raises:
        ValueError: one of them takes the run for another.
    """
    for each in data:
        stream: Any = each.dataset if isinstance(each, DataLoader) else each
        # Asked of nothing else, since it may be anything of the user's.
        world = stream._parallel_rank_world if _is_of(stream, _MOSAICML) else None
        if world is not None and world.num_ranks != num_parts > 1:
            names = {"rank": world.rank, "size": world.num_ranks, "part": 0, "num_parts": num_parts}
            raise ValueError(_BY_ENVIRONMENT.format(name=type(stream).__name__, **names))


def check_script_makes_none(num_ranks: int) -> None:
    """Checks that no stream of MosaicML's is alive, before each other rank runs the script from its beginning.

    A stream that the script makes before the launch would be made there by a process that is not connected yet: it
    waits for the others, or fails by a FileExistsError.

    Args:
        num_ranks: of the run.

    Raises:
        ValueError: there is one, whether the run would read it or not.
    """
    kind = getattr(sys.modules.get(_MOSAICML), "StreamingDataset", None)
    if num_ranks == 1 or kind is None:
        return
    for made in gc.get_objects():  # it may be anywhere: in the module, in a variable of a function
        if kind in type(made).__mro__:
            raise ValueError(_BEFORE_LAUNCH.format(name=type(made).__name__, num_ranks=num_ranks))


@contextmanager
def naming_foreign_ranks(rank: int, num_ranks: int, num_local: int) -> Iterator[None]:
    """Says why a stream of MosaicML's can't be made in a rank, where it is because of who it takes the rank for.

    Each rank that takes itself for the first of its machine makes the shared memory of all of them, which only one can.

    Args:
        rank: this one.
        num_ranks: of the run.
        num_local: of them on this machine.

    Raises:
        ValueError: in place of MosaicML's FileExistsError.
    """
    try:
        yield
    except FileExistsError as error:
        stream = _made_in(error.__traceback__)
        world = getattr(stream, "_unique_rank_world", None)
        if world is None or (world.rank, world.num_ranks, world.ranks_per_node) == (rank, num_ranks, num_local):
            raise
        theirs, ours = (
            f"{world.num_ranks} ({world.ranks_per_node} per machine)",
            f"{num_ranks} ({num_local} per machine)",
        )
        names = {"rank": world.rank, "size": theirs, "part": rank, "num_parts": ours}
        raise ValueError(_BY_ENVIRONMENT.format(name=type(stream).__name__, **names)) from error


def _made_in(frames: TracebackType | None) -> Any:
    """The data set of MosaicML's in a method of which an exception was raised; None without one."""
    found = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(frames))
    return next((each for each in found if _is_of(each, _MOSAICML) and hasattr(each, "_unique_rank_world")), None)


def _is_of(data: Any, *packages: str) -> bool:
    """Whether the class of `data`, or one that it inherits from, is of one of these packages; none is imported."""
    return any(cls.__module__.partition(".")[0] in packages for cls in type(data).__mro__)


def _shards_itself(data: Any) -> bool:
    if isinstance(said := getattr(data, "shards_itself", None), bool):
        return said
    if getattr(data, "_distributed", None) is not None:  # Hugging Face's
        return True
    return _is_of(data, *_SHARD_THEMSELVES)


def shard_of(loader: DataLoader, num_shards: int, index: int) -> DataLoader | None:
    """Returns a loader of one rank's part of the stream; None if every rank would read all of it.

    Args:
        loader: the user's; it is returned if its data set shards itself.
        num_shards: number of ranks.
        index: this rank.

    Raises:
        ValueError: the data set has fewer shards (`num_shards`) than there are ranks, or other samples by its shards.
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
    """An evaluation loader that ends at the same batch as those of the other ranks.

    Before each batch the ranks gather whether they have one left. A rank without one repeats its last batch, as a
    *padding batch* that it runs for its collectives only, until no rank has any. The first `num_real` are not padding.
    """

    all_gather_bools: Callable[[bool], list[bool]]
    """Takes this rank's flag and returns those of all ranks, in rank order; all ranks call it together."""
    length: int | None
    """The largest number of batches of a rank; None if some rank does not know its own."""
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
            yield latest
            batch = next(batches, nothing) if batch is not nothing else nothing
            have_batch = self.all_gather_bools(batch is not nothing)


def as_uneven_eval(
    loader: DataLoader, all_gather_bools: Callable[[bool], list[bool]], length: int | None
) -> UnevenEvalLoader:
    """Returns a copy of an evaluation loader that ends at the same batch as those of the other ranks.

    Args:
        loader: of this rank.
        all_gather_bools: see `UnevenEvalLoader`.
        length: see `UnevenEvalLoader`.
    """
    attributes: dict[str, Any] = {"all_gather_bools": all_gather_bools, "length": length, "num_real": math.inf}
    return clone_loader(loader, UnevenEvalLoader, **attributes)
