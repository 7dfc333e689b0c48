"""The tables of docs/data.md: what becomes of each kind of training data, found by training on it.

``python -m tests.docs.data_matrix`` writes the page anew, in some minutes; `test_data_matrix.py` compares its first
table with what is found, and looks at a cell of each of the others, which are of several ranks (`data_ranks.py`).
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.distributed import ROOT
from tests.engine.data.runs import train
from tests.engine.data.test_replayed import Buffered
from tests.engine.tiny import CountingStream, Positions, SavesIn, Stream

from .data_libraries import EPOCHS as LIBRARY_EPOCHS
from .data_libraries import library_table
from .data_ranks import RANKS, rank_table, stop_table
from .data_ranks import STOP as RANK_STOP
from .package_run import BATCH as LIBRARY_BATCH
from .package_run import SIZE as LIBRARY_SIZE
from .package_run import STOP as LIBRARY_STOP

PAGE = ROOT / "docs" / "data.md"
SIZE, BATCH, STOP, EPOCHS = 24, 3, 4, 4
_EACH = Counter(range(SIZE))


class Shuffled(Sampler[int]):
    """A sampler of the user's own."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class Endless:
    """A sampler that does not say how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(Shuffled())


class Batches(BatchSampler):
    """A batch sampler of the user's own."""


class Shards(Stream):
    """A stream of four shards, read one after the other."""

    num_shards, shards_in_order = 4, True

    def __init__(self, numbers: range = range(SIZE)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> "Shards":
        size = len(self.numbers) // num_shards
        return Shards(self.numbers[index * size : (index + 1) * size])


class Iterable:
    """Batches, from nobody knows where."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(SIZE).split(self.batch_size))


def _map(**given: Any) -> Callable[..., Any]:
    def make(batch_size: int, **arguments: Any) -> DataLoader:
        extra = {name: value() for name, value in given.items()}
        return DataLoader(Positions(SIZE), batch_size, **extra, **arguments)

    return make


def _batches(batch_size: int, **arguments: Any) -> DataLoader:
    return DataLoader(Positions(SIZE), batch_sampler=Batches(Shuffled(), batch_size, False), **arguments)


def _distributed(batch_size: int, **arguments: Any) -> DataLoader:
    is_group = torch.distributed.is_initialized()
    ranks = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if is_group else (1, 0)
    sampler: Any = DistributedSampler(Positions(SIZE), *ranks)
    return DataLoader(Positions(SIZE), batch_size, sampler=sampler, **arguments)


def _stream(make_dataset: Callable[[], Any]) -> Callable[..., Any]:
    return lambda batch_size, **arguments: DataLoader(make_dataset(), batch_size, **arguments)


KINDS: dict[str, Callable[..., Any]] = {
    "in order": _map(),
    "`shuffle=True`": _map(shuffle=lambda: True),
    "a sampler of yours": _map(sampler=Shuffled),
    "a batch sampler of yours": _batches,
    "a `DistributedSampler` of yours": _distributed,
    "a sampler without `__len__`": _map(sampler=Endless),
    "`StatefulDataLoader`, `shuffle=True`": lambda size, **how: StatefulDataLoader(
        Positions(SIZE), size, shuffle=True, **how
    ),
    "`IterableDataset`": _stream(lambda: Stream(SIZE)),
    "`IterableDataset` with `state_dict`": _stream(lambda: CountingStream(SIZE)),
    "`IterableDataset` with a shuffle buffer of Hugging Face's": _stream(Buffered),
    "`IterableDataset` with shards": _stream(Shards),
    "an iterable of batches": lambda size, **_: Iterable(size),
}
COLUMNS = ["resumed", "other batch size", "other `num_workers`"]


def _run(make: Callable[[], Any], checkpoint: Path | None = None, **flags: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of few workers
        return train(make, checkpoint, max_epochs=EPOCHS, **flags)


def _is_once(seen: list[Any]) -> bool:
    """Whether each sample was seen once in each epoch."""
    epochs = [Counter(i for epoch, _, batch in seen if epoch == number for i in batch) for number in range(EPOCHS)]
    return epochs == [_EACH] * EPOCHS


def _verdict(check: Callable[..., bool], *arguments: Any) -> str:
    try:
        return "yes" if check(*arguments) else "SILENTLY WRONG"
    except (TypeError, ValueError):
        return "refused"


def _goes_on(make: Callable[[], Any], path: Path, rest: list[Any]) -> bool:
    return _run(make, path) == rest


def _goes_on_once(make: Callable[[], Any], path: Path, done: list[Any]) -> bool:
    return _is_once(done + _run(make, path))


def one_process(folder: Path) -> str:
    """The first part of docs/data.md; checkpoints are saved in `folder`."""
    rows = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for number, (kind, make) in enumerate(KINDS.items()):
        path = folder / f"{number}.ckpt"
        whole = _run(partial(make, BATCH), callbacks=[SavesIn("on_train_batch_end", STOP, path)])
        done = whole[:STOP]
        rows.append(
            [
                kind,
                _verdict(_goes_on, partial(make, BATCH), path, whole[STOP:]),
                _verdict(_goes_on_once, partial(make, 4), path, done),
                _verdict(_goes_on_once, partial(make, BATCH, num_workers=1), path, done),
            ]
        )
    return _ABOVE + _table(rows) + _BELOW


def _table(rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page(folder: Path) -> str:
    """The text of docs/data.md."""
    ranks = _table(rank_table(KINDS, BATCH, _EACH, folder))
    stops = _table(stop_table(folder))
    libraries = _table(library_table(folder, PAGE.read_text()))
    parts = [one_process(folder), _RANKS, ranks, _RANKS_BELOW, _STOPS, stops, _LIBRARIES, libraries, _LIBRARIES_BELOW]
    return "".join([*parts, _PROMISES])


_ABOVE = f"""# Which training data continue after a stop in mid-epoch

Each row is a kind of training data, each column a question. A cell is what was found by training:

- *yes*: tried, and right.
- *refused*: an error before the first step, which says what to do instead. Nothing was trained on wrong samples.
- *no: ...*: it runs, but not so; what happens is in the cell.
- *-*: the question does not arise, since the run was refused before.

`python -m tests.docs.data_matrix` writes this page, and `make nightly` compares it with what is found again, except for
libraries that are not installed. Rows of those stay as they are. The rules behind them:
[checkpoints.md](checkpoints.md).

## One process

{SIZE} samples, batches of {BATCH}, {EPOCHS} epochs. A run saved a checkpoint after {STOP} batches of the first epoch.
A second run continued from it.

"""
_BELOW = """
- **resumed**: the second run trains on the batches that the first one trained on after its checkpoint, in the same
  order, in that epoch and the three after it.
- **other batch size** (4 rather than 3), **other `num_workers`** (1 rather than 0): in the second run. Each sample is
  trained on once in the epoch that was stopped, both runs together, and once in each of the three after it.
"""
_RANKS = f"""
## Two ranks

The same data and epochs under `ddp_fork` with {RANKS} processes; the checkpoint is of {RANK_STOP} batches of each.

"""
_RANKS_BELOW = """
- **each sample once**: each sample is trained on once in each of the four epochs, by one of the two ranks.
- **evaluated once**: `validate` evaluates each sample once, on one of the two ranks.
- **resumed**: with two ranks again, each rank trains on the batches of the run that was not stopped.
- **resumed in one process**: each sample is trained on once in the epoch that was stopped, both runs together, and once
  in each of the three after it.
"""
_STOPS = """
## Launchers and stops

Two ranks, a `Snapshot` every two steps. Each run was stopped in its first epoch, and started again with
`resume="auto"` for the rest of it and one epoch or three more. *yes*: both runs together trained each rank on the
batches, epoch by epoch, of a run that was not stopped. (Steps after the last snapshot are done again.) `make nightly`
runs all of them again.

- **`SIGTERM`** was sent to one of the ranks; both saved and stopped after the same step.
- **`max_steps`** was reached.
- **`kill -9`** ended one of the ranks, and the engine the other.

Launchers: `ddp_fork` and `ddp_spawn` start workers by `multiprocessing`, `ddp` starts the script once more for each
rank, and torchrun starts all of them.

"""
_LIBRARIES = f"""
## Public libraries

{LIBRARY_SIZE} samples in 8 shards, batches of {LIBRARY_BATCH}, {LIBRARY_EPOCHS} epochs under `ddp` on 2 ranks; the
checkpoint is of {LIBRARY_STOP} batches of each rank. A second run continued from it.

- *once*: each sample is trained on once in each epoch; where the run was resumed, both runs together.
- *same batches*: each rank trains on the batches of the run that was not stopped.
- *refused by ...*: an error of the library's.

"""
_LIBRARIES_BELOW = """
MosaicML's streams find out their rank from `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` when they are
made. `polyphase launch` and torchrun set these variables before the script starts. Without them, under `ddp`, the
engine sets them in each rank when the run begins: make the data set in `train_dataloader()` or `setup()`. A data set
that the script makes before `fit` is refused before any process starts.

litdata's own loader applies a loaded state to the epoch after the resumed one, too, unless a pass is read to its end;
the engine clears it as that epoch begins. It was tried on 1 and 2 ranks, with 0 and 2 workers, saved in mid-epoch and
after an epoch's last batch; with other data sets than `StreamingDataset` it is refused. Under `tp` and `pp`, ranks that
compute together need the same samples: a data set that divides itself among all ranks is refused there.

`pip install "polyphase[data]"` installs `datasets` and `webdataset`. It does not install `litdata`, which requires
torchvision, whose wheel on PyPI breaks the import of Lightning beside a CPU-only torch. Its rows, and those of
`mosaicml-streaming`, were found in an environment of their own.
"""
_PROMISES = """
## What is promised

**Seeds.** The order of samples is drawn as one process draws it: from the generator that you gave to the loader or the
sampler, else from the global generators, which `seed_everything` seeds. Rank 0 sends their states to the other ranks
when a pass over the data begins, and a checkpoint contains them. A run that is resumed needs the same data and the same
sampler; it does not need the same seed.

Two cases draw other orders for later epochs. Samplers without replacement still give each sample once; those with
replacement draw other samples.

- A run that continues with other ranks, batches or workers starts persistent workers (`persistent_workers=True`) anew,
  and torch draws their seed first.
- With `reload_dataloaders_every_n_epochs`, one run has workers and the other has none: workers also draw an order for
  an iterator that Lightning makes of a new loader and does not use.

**Augmentation.** With as many ranks and workers as before, a resumed run draws the random numbers that the run that was
not stopped draws: from Python's, NumPy's and torch's global generators, and from generators that the data set holds (an
attribute, also of a transform, a list, a `functools.partial` or a closure), in the main process and in workers. With
other numbers of ranks or workers, give `seed_samples=True`: then the random numbers of a sample depend on seed, epoch
and index alone.

**Streams.** Each rank keeps its position in an `IterableDataset`, and a resumed run needs as many ranks. A stream
without `state_dict` is read again up to that position, with the generators in the states in which the epoch began, so
that it draws the same order. If it draws from global generators between its samples, in the main process, and the
training draws from them, too, a warning says that other samples may come. If it yields other batches than before, as
webdataset's `shuffle` without a seed does, that is an error.

**Other loaders.** A loader of another class than `DataLoader` that has a `state_dict`, such as torchdata's
`nodes.Loader`, continues on as many ranks. With several ranks it has to say whether it divides itself among them
(`shards_itself = True`) or each rank reads all of it (`False`). Without a `state_dict` it is refused in mid-epoch.

**Shards.** A stream with `shards_in_order = True` is divided by shards, and continues with any number of ranks, workers
and samples in a batch. A shard that was begun continues after the last sample trained on, in the order that was drawn
for it; without a `state_dict` it is read again up to there, and if it yields other samples each time, that is an error.
A rank that has no samples left takes part with a batch that counts for nothing.

**Several loaders.** Loaders that are read side by side (a dict or list of loaders, a `CombinedLoader`) continue
together, each in its own order. On several ranks each of them needs a number of samples that the ranks divide, or
`drop_last=True`; others are refused by name: see [guarantees.md](guarantees.md#batches). A checkpoint in mid-epoch may
leave a number of samples that another number of ranks does not divide, which is refused, too. Shards of a stream beside
other loaders continue on as many ranks. `mode="sequential"` is for evaluation: Lightning refuses it in training.

**Epoch numbers.** What a hook gives a data set by `set_epoch`, or as its attribute `epoch`, a resumed run gives it
again. If workers have started before that, and so would not see it, that is an error.

**Not seen**: generators in modules, global variables or C extensions; generators of validation data; other global state
that a data set changes, such as a counter or a cache. With another number of ranks, workers draw other numbers.
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(Path(temporary)))
