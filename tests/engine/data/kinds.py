"""The kinds of training data that `draws.py` draws from; each sample is its own number."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data import LengthBucketing

STRUCTURES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.tensor(i),
    "dict": lambda i: {"id": i, "row": torch.full((2,), float(i))},
    "tuple": lambda i: (i, torch.full((2,), float(i))),
    "nested": lambda i: {"inner": (torch.tensor(i), {"row": torch.zeros(2)})},
}


class Numbers(Dataset[Any]):
    """Sample i is the number i, in some structure."""

    def __init__(self, size: int, structure: str) -> None:
        self.size, self.structure = size, structure

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return STRUCTURES[self.structure](index)


class NumberStream(IterableDataset[Any]):
    """The same, as a stream; workers share it."""

    def __init__(self, numbers: range, structure: str) -> None:
        self.numbers, self.structure = numbers, structure

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        numbers = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (STRUCTURES[self.structure](i) for i in numbers)


class ShardedStream(NumberStream):
    """One that the ranks share."""

    def shard(self, num_shards: int, index: int) -> "ShardedStream":
        return type(self)(self.numbers[index::num_shards], self.structure)


class StatefulStream(ShardedStream):
    """One that says where it is."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        numbers = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        while self.at < len(numbers):
            self.at += 1
            yield STRUCTURES[self.structure](numbers[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnSampler(Sampler[int]):
    """A sampler of the user's own, which draws from the global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


def _map(what: Any, **more: Any) -> DataLoader:
    return DataLoader(Numbers(what.num_samples, what.structure), what.batch_size, drop_last=what.drop_last, **more)


def _stream(what: Any, cls: type[NumberStream], make: type[DataLoader] = DataLoader, **more: Any) -> DataLoader:
    return make(cls(range(what.num_samples), what.structure), what.batch_size, drop_last=what.drop_last, **more)


def _in_batches(what: Any, sampler: Any, **more: Any) -> DataLoader:
    return DataLoader(Numbers(what.num_samples, what.structure), batch_sampler=sampler, **more)


def _combined(mode: str) -> Callable[..., CombinedLoader]:
    def make(what: Any, rank: int, num_ranks: int, **more: Any) -> CombinedLoader:
        short = DataLoader(Numbers(max(1, what.num_samples // 2), what.structure), what.batch_size, **more)
        return CombinedLoader({"a": _map(what, shuffle=True, **more), "b": short}, mode)  # type: ignore[arg-type]

    return make


def _distributed(what: Any, rank: int, num_ranks: int, **more: Any) -> DataLoader:
    data = Numbers(what.num_samples, what.structure)
    sampler: Any = DistributedSampler(data, num_replicas=num_ranks, rank=rank)
    return DataLoader(data, what.batch_size, sampler=sampler, drop_last=what.drop_last, **more)


def _stateful_shuffled(what: Any, *_: Any, **more: Any) -> DataLoader:
    data = Numbers(what.num_samples, what.structure)
    return StatefulDataLoader(data, what.batch_size, shuffle=True, drop_last=what.drop_last, **more)


KINDS: dict[str, Callable[..., Any]] = {
    "in order": lambda what, *_, **more: _map(what, **more),
    "shuffle": lambda what, *_, **more: _map(what, shuffle=True, **more),
    "shuffle, own generator": lambda what, *_, **more: _map(
        what, shuffle=True, generator=torch.Generator().manual_seed(3), **more
    ),
    "own sampler": lambda what, *_, **more: _map(what, sampler=OwnSampler(what.num_samples), **more),
    "subset": lambda what, *_, **more: _map(what, sampler=SubsetRandomSampler(range(0, what.num_samples, 2)), **more),
    "weighted": lambda what, *_, **more: _map(
        what, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(what.num_samples)], what.num_samples), **more
    ),
    "own batch sampler": lambda what, *_, **more: _in_batches(
        what, OwnBatches(OwnSampler(what.num_samples), what.batch_size, what.drop_last), **more
    ),
    "length bucketing": lambda what, *_, **more: _in_batches(
        what,
        LengthBucketing(
            [1 + i % 5 for i in range(what.num_samples)], 5 * what.batch_size, drop_last=what.drop_last, group=2
        ),
        **more,
    ),
    "DistributedSampler": _distributed,
    "StatefulDataLoader, shuffle": _stateful_shuffled,
    "StatefulDataLoader, stream": lambda what, *_, **more: _stream(what, ShardedStream, StatefulDataLoader, **more),
    "stream": lambda what, *_, **more: _stream(what, NumberStream, **more),
    "stream with shard": lambda what, *_, **more: _stream(what, ShardedStream, **more),
    "stream with state_dict": lambda what, *_, **more: _stream(what, StatefulStream, **more),
    **{f"CombinedLoader, {mode}": _combined(mode) for mode in ("min_size", "max_size", "max_size_cycle", "sequential")},
}
BATCHED = {"own batch sampler", "length bucketing"}
"""Whose batches are dealt as they are."""
STREAMS = {name for name in KINDS if "stream" in name}
COMBINED = {name for name in KINDS if "Combined" in name}
IN_ONE_PROCESS = {"stream"}
"""Of which several ranks would each read all."""
OWN_RANKS = {"DistributedSampler"}
"""That deal to the ranks themselves."""


def load(what: Any, rank: int, num_ranks: int) -> Any:
    """The loader of a draw, for a rank."""
    workers = {"num_workers": what.num_workers}
    if what.persistent:
        workers["persistent_workers"] = True
    return KINDS[what.kind](what, rank, num_ranks, **workers)


def ids_of(batch: Any) -> list[Any]:
    """The numbers of a batch's samples; of a combined one, by loader."""
    if isinstance(batch, dict) and batch.keys() == {"a", "b"}:
        return [ids_of(batch["a"]), ids_of(batch["b"])]
    if isinstance(batch, dict):
        return ids_of(next(iter(batch.values())))
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], int):
        return ids_of(batch[0])
    if batch is None:
        return []
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
