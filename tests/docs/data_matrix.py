"""The table of docs/data.md: what becomes of each kind of training data, found by training on it.

``python -m tests.docs.data_matrix`` writes the page anew; `test_data_matrix.py` compares it with what is found.
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
from tests.engine.tiny import Positions, SavesIn, Stream

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


class Counts(Stream):
    """A stream that says where it is."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


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
    sampler: Any = DistributedSampler(Positions(SIZE), num_replicas=1, rank=0)
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
    "`IterableDataset` with `state_dict`": _stream(lambda: Counts(SIZE)),
    "`IterableDataset` with a shuffle buffer of Hugging Face's": _stream(Buffered),
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


def page(folder: Path) -> str:
    """The text of docs/data.md; checkpoints are saved in `folder`."""
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
    return _ABOVE + "".join("| " + " | ".join(row) + " |\n" for row in rows) + _BELOW


_ABOVE = f"""# Which training data go on after a stop in mid-epoch

Written by `python -m tests.docs.data_matrix`, from what it finds in one process: {SIZE} samples, batches of {BATCH},
{EPOCHS} epochs; each run was stopped after {STOP} batches of the first. The rules: [checkpoints.md](checkpoints.md).

"""
_BELOW = """
- **resumed**: the same batches in the same order as the run that was not stopped, in this epoch and the three after it.
- **other batch size** (4), **other `num_workers`** (1): each sample once in the epoch that was stopped, both runs
  together, and once in each of the three after it.
- *refused*: an error before the first step that says what can be done.
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(Path(temporary)))
