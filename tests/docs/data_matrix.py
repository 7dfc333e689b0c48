"""The tables of benchmarks/results/data-cpu.md: what becomes of each kind of training data, found by training on it.

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

PAGE = ROOT / "benchmarks" / "results" / "data-cpu.md"
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
    """The first part of benchmarks/results/data-cpu.md; checkpoints are saved in `folder`."""
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
    """The text of benchmarks/results/data-cpu.md."""
    ranks = _table(rank_table(KINDS, BATCH, _EACH, folder))
    stops = _table(stop_table(folder))
    libraries = _table(library_table(folder, PAGE.read_text()))
    parts = [one_process(folder), _RANKS, ranks, _RANKS_BELOW, _STOPS, stops, _LIBRARIES, libraries, _LIBRARIES_BELOW]
    return "".join(parts)


_ABOVE = f"""# Training data after a stop in mid-epoch

What a resumed run trains on, found by training on it; in short: [training data](../../docs/data.md).

    python -m tests.docs.data_matrix

A cell: *yes*: tried, and right. *refused*: an error before the first step, with a remedy. *-*: that run was refused
before. `make nightly` compares this page with what is found again; rows of libraries that are not installed stay.

## One process

{SIZE} samples, batches of {BATCH}, {EPOCHS} epochs. A run saved a checkpoint after {STOP} batches of the first epoch.
A second run continued from it.

"""
_BELOW = """
- **resumed**: it trains on the batches that the first one trained on after its checkpoint, in the same order.
- **other batch size** (4 rather than 3), **other `num_workers`** (1 rather than 0): each sample once in each epoch.
"""
_RANKS = f"""
## Two ranks

The same data and epochs under `ddp_fork` with {RANKS} processes; the checkpoint is of {RANK_STOP} batches of each.

"""
_RANKS_BELOW = """
**resumed**: with two ranks, the batches of the run that was not stopped; **in one process**: each sample once in each
epoch, both runs together.
"""
_STOPS = """
## Launchers and stops

Two ranks, a `Snapshot` every two steps, stopped in the first epoch by `max_steps`, by `SIGTERM` and by `kill -9` of one
rank, and started again with `resume="auto"`. *yes*: each time both runs together trained each rank on the batches of a
run that was not stopped.

"""
_LIBRARIES = f"""
## Public libraries

{LIBRARY_SIZE} samples in 8 shards, batches of {LIBRARY_BATCH}, {LIBRARY_EPOCHS} epochs under `ddp` on 2 ranks; the
checkpoint is of {LIBRARY_STOP} batches of each rank. *once*: each sample once in each epoch, both runs together. *same
batches*: those of the run that was not stopped.

"""
_LIBRARIES_BELOW = """
- MosaicML's streams read their rank from variables that torchrun and `polyphase launch` set before the script starts,
  and `ddp` when the run begins: make the data set in `train_dataloader()` or `setup()`.
- Of litdata only `StreamingDataset` is not refused.
- Under `tp` and `pp` a data set that divides itself among all ranks is refused: ranks there need the same samples.
- `pip install "polyphase[data]"` installs `datasets` and `webdataset`. `litdata` needs torchvision, whose wheel breaks
  Lightning's import beside a CPU-only torch.
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(Path(temporary)))
