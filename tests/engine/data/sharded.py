"""A stream with shards, of unequal sizes, and what a run of several ranks was trained on, by rank."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..tiny import Seen, engine

SIZES = [5, 0, 7, 1, 4, 9, 3, 6]
EACH = Counter(range(sum(SIZES)))
Seen_ = list[tuple[int, list[int]]]


class Sharded(IterableDataset[int]):
    """Shard i has the `SIZES[i]` numbers that follow those of the shards before it; notes what is read of them.

    Args:
        indices: of its shards.
        log: file in which each number that is read is noted.
    """

    shards_in_order = True

    def __init__(self, indices: list[int] | None = None, log: Path | None = None) -> None:
        self.indices, self.log = list(range(len(SIZES))) if indices is None else indices, log

    @property
    def num_shards(self) -> int:
        return len(self.indices)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return type(self)(self.indices[index::num_shards], self.log)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        for shard in self.indices[worker.id :: worker.num_workers] if worker else self.indices:
            for number in range(sum(SIZES[:shard]), sum(SIZES[: shard + 1])):
                self.note(number)
                yield number

    def note(self, number: int) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{number}\n")


class Stated(Sharded):
    """Its shards say where they are, so that nothing is read twice."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        for shard in self.indices:
            for number in range(sum(SIZES[:shard]) + self.at, sum(SIZES[: shard + 1])):
                self.note(number)
                self.at += 1
                yield number
            self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Notes(Seen):
    """Leaves behind, in a folder, which samples each rank was trained on: batches that count for nothing left out."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers = batch["number"] if isinstance(batch, dict) else batch
        self.seen.append((self.trainer.current_epoch, numbers.tolist()))
        return self.weight * 1.0

    def on_train_end(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{self.trainer.global_rank}").write_text(json.dumps(self.seen))


def run(
    folder: Path, make: Callable[[], Any], ranks: int = 1, checkpoint: Path | None = None, **flags: Any
) -> list[Seen_]:
    """What each rank of a run was trained on: the number of the epoch, and a batch."""
    strategy = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {}
    seed_everything(7, verbose=False)
    engine(**{"max_epochs": 4, **strategy, **flags}).fit(Notes(folder), make(), ckpt_path=checkpoint)
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(ranks)]


def is_once(seen: Seen_, epochs: int = 4) -> bool:
    """Whether each sample is once in each of the epochs."""
    return [Counter(i for epoch, batch in seen if epoch == n for i in batch) for n in range(epochs)] == [EACH] * epochs
