"""Two ranks, each with an order of samples of its own: a run that is gone on with was never stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ..tiny import Positions, SavesIn, Seen, engine

SIZE = 37


class Data(LightningDataModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        rank, data = self.trainer.global_rank, Positions(SIZE)
        if self.kind == "a sampler of the user's":
            return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=rank))
        if self.kind == "other lengths":
            return DataLoader(Subset(data, range(rank * 14, 14 + rank * (SIZE - 14))), batch_size=3, shuffle=True)
        if self.kind == "batches of another number in each epoch":
            return DataLoader(data, batch_sampler=Growing())
        return DataLoader(data, batch_size=3, shuffle=True)


class Growing:
    """A batch sampler with `set_epoch`: batches of five samples in the first epoch, then of four, then of three."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-SIZE // (5 - self.epoch))

    def __iter__(self) -> Any:
        return iter(torch.arange(SIZE).split(5 - self.epoch))


class Writes(Seen):
    """Leaves behind what each rank was trained on, and the weight after each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.current_epoch, batch_idx, batch.tolist(), self.weight.item()))
        return self.weight * 1.0

    def on_train_end(self) -> None:
        (self.folder / f"{self.trainer.global_rank}").write_text(json.dumps([*self.seen, self.weight.item()]))


def run(folder: Path, kind: str, checkpoint: Path | None = None, **flags: Any) -> list[list[Any]]:
    folder.mkdir()
    seed_everything(7 if checkpoint is None else 8, verbose=False)
    flags["use_distributed_sampler"] = kind in ("a sampler of the user's", "batches of another number in each epoch")
    trainer = engine(strategy="ddp_fork", devices=2, max_epochs=3, **flags)
    trainer.fit(Writes(folder), datamodule=Data(kind), ckpt_path=checkpoint)
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["a sampler of the user's", "an order of each rank's", "other lengths"])
def test_goes_on_with_the_same_samples_and_steps(kind, tmp_path):
    whole = run(tmp_path / "whole", kind, callbacks=[SavesIn("on_train_batch_end", 3, tmp_path / "saved")])
    rest = run(tmp_path / "rest", kind, tmp_path / "saved")
    assert rest == [of_rank[3:] for of_rank in whole]


def test_an_epoch_has_as_many_batches_as_its_batch_sampler_has_then(tmp_path):
    kind = "batches of another number in each epoch"
    whole = run(tmp_path / "whole", kind, callbacks=[SavesIn("on_train_batch_end", 5, tmp_path / "saved")])
    for number in range(3):
        trained = [i for rank in whole for epoch, _, batch, _ in rank[:-1] if epoch == number for i in batch]
        assert sorted(trained) == list(range(SIZE))
    rest = run(tmp_path / "rest", kind, tmp_path / "saved")
    assert rest == [of_rank[5:] for of_rank in whole]


def test_a_batch_that_is_none_on_one_rank_ends_the_run():
    def collate(samples):
        return None if 5 in samples else torch.tensor(samples)

    with pytest.raises(ProcessRaisedException, match=r"yielded None as batch 1 of rank 1, and the other ranks"):
        engine(strategy="ddp_fork", devices=2).fit(Seen(), DataLoader(Positions(12), batch_size=2, collate_fn=collate))
