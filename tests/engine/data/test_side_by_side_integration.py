"""Two ranks that read several loaders side by side: as one process does, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from polyphase.engine.data.uneven import check_evaluated_side_by_side
from tests.pairs import alternating, nightly

from ..tiny import Positions, SavesIn, Stream, engine, rows
from .runs import combined
from .test_streams import OwnRanks, as_uneven_eval

BATCH = 2


class Sums(LightningModule):
    """Its loss has a mean over each loader's samples, with a weight that their numbers change otherwise each."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder, self.seen = folder, []
        self.weights = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.folder is not None:
            (self.folder / "stepped").touch()
        parts = [batch["a"], batch["b"]]
        self.seen.append([[] if part is None else part.tolist() for part in parts])
        means = [
            (weight * part.double() / 10).sin().mean()
            for weight, part in zip(self.weights, parts, strict=True)
            if part is not None
        ]
        return torch.stack(means).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([[] if part is None else part.tolist() for part in (batch["a"], batch["b"])])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def _write(self) -> None:
        if self.folder is not None:
            found = {"weights": self.weights.tolist(), "seen": self.seen}
            (self.folder / f"{self.global_rank}").write_text(json.dumps(found))

    on_train_end = on_validation_end = _write


def loaders(mode: str, sizes: tuple[int, int], **more: Any) -> Any:
    batch_size = more.pop("batch_size", BATCH)
    first, second = (DataLoader(Positions(size), batch_size, **more) for size in sizes)
    return combined(mode, a=first, b=second)


def on_two_ranks(folder: Path, make: Callable[[], Any], method: str = "fit", **flags: Any) -> list[Any]:
    """What each rank leaves behind."""
    folder.mkdir()
    seed_everything(7, verbose=False)
    checkpoint = flags.pop("ckpt_path", None)
    trainer = engine(**{"strategy": "ddp_fork", "devices": 2, "max_epochs": 2, "limit_val_batches": 1.0, **flags})
    if method == "validate":
        trainer.validate(Sums(folder), make(), verbose=False)
    else:
        made = make()
        data = {"datamodule" if isinstance(made, LightningDataModule) else "train_dataloaders": made}
        trainer.fit(Sums(folder), **data, ckpt_path=checkpoint)
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(2)]


MODES = ["max_size", "max_size_cycle", "min_size"]


@pytest.mark.parametrize(("mode", "sizes"), alternating(MODES, [[12, 6], [14, 6]]))
def test_even_shares_are_those_of_one_process(mode, sizes, tmp_path):
    alone = Sums()
    engine(max_epochs=2).fit(alone, loaders(mode, sizes, batch_size=2 * BATCH))
    ranks = on_two_ranks(tmp_path / "ranks", lambda: loaders(mode, sizes))
    for rank in ranks:
        assert rank["weights"] == pytest.approx(alone.weights.tolist(), abs=1e-12)
    for step, of_ranks in zip(alone.seen, zip(*(rank["seen"] for rank in ranks), strict=True), strict=True):
        for number in range(2):
            assert sorted(step[number]) == sorted(i for rank in of_ranks for i in rank[number])


ONE_SAMPLE = "loader 2 of 2, over a Positions, .* has 1 samples"


@pytest.mark.parametrize(
    ("mode", "sizes", "found"),
    [
        ("max_size_cycle", (12, 5), ONE_SAMPLE),
        *nightly(*((mode, (12, 5), ONE_SAMPLE) for mode in ("max_size", "min_size"))),
        ("max_size", (11, 4), "loader 1 of 2, over a Positions, .* has 3 samples"),
        ("min_size", (9, 9), "loader 1 of 2, over a Positions, .* has 1 samples"),
    ],
)
def test_uneven_shares_are_refused_before_the_first_step(mode, sizes, found, tmp_path):
    text = f"{found} for its last step, which the ranks can't share evenly"
    with pytest.raises(ProcessRaisedException, match=text):
        on_two_ranks(tmp_path / "ranks", lambda: loaders(mode, sizes))
    assert not (tmp_path / "ranks" / "stepped").exists()
    ranks = on_two_ranks(tmp_path / "full", lambda: loaders(mode, sizes, drop_last=True))
    assert all(len(part) in (0, BATCH) for rank in ranks for step in rank["seen"] for part in step)
    for epoch in range(2):
        half = len(ranks[0]["seen"]) // 2
        seen = [i for rank in ranks for step in rank["seen"][epoch * half : (epoch + 1) * half] for i in step[0]]
        assert len(seen) == len(set(seen))


def test_what_is_not_read_is_not_asked_for(tmp_path):
    """min_size ends before the longer loader's last step, and so does a limit."""
    assert on_two_ranks(tmp_path / "least", lambda: loaders("min_size", (13, 4)))
    assert on_two_ranks(tmp_path / "limit", lambda: loaders("max_size", (13, 9)), limit_train_batches=2)


class TwoSizes(BatchSampler):
    """Batches of the user's own: the second half of them is larger."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(SequentialSampler(range(sum(sizes))), 1, False)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Any:
        return iter(torch.arange(sum(self.sizes)).split(self.sizes))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([2, 2, 3, 3], None),
        ([2, 2, 2, 3], r"has batches of \[2, 3\] samples for a step"),
        ([2, 2, 2], "has 1 batches for its last"),
    ],
)
def test_batches_of_a_batch_sampler(sizes, text, tmp_path):
    def make() -> Any:
        own = DataLoader(Positions(sum(sizes)), batch_sampler=TwoSizes(sizes))
        return combined("max_size", a=DataLoader(Positions(12), BATCH), b=own)

    if text is None:
        ranks = on_two_ranks(tmp_path / "ranks", make, max_epochs=1)
        assert sorted(i for rank in ranks for step in rank["seen"] for i in step[1]) == list(range(sum(sizes)))
        return
    with pytest.raises(ProcessRaisedException, match=text):
        on_two_ranks(tmp_path / "ranks", make)
    assert not (tmp_path / "ranks" / "stepped").exists()


def of_streams(drop_last: bool) -> Any:
    own = DataLoader(OwnRanks(13), BATCH, drop_last=drop_last)  # 7 and 6 samples
    return combined("max_size", a=DataLoader(Positions(16), BATCH), b=own)


def test_a_stream_is_refused_where_its_shares_become_uneven(tmp_path):
    text = r"loader 2 of 2, over a OwnRanks, .* has \[1, 0\] samples for batch 3, .* uneven='drop'"
    with pytest.raises(ProcessRaisedException, match=text):
        on_two_ranks(tmp_path / "ranks", lambda: of_streams(False))
    ranks = on_two_ranks(tmp_path / "drop", lambda: of_streams(True), uneven="drop", max_epochs=1)
    assert [[step[1] for step in rank["seen"]] for rank in ranks] == [
        [[0, 2], [4, 6], [8, 10], []],
        [[1, 3], [5, 7], [9, 11], []],
    ]


class OwnOrders(LightningDataModule):
    """Each rank has data of its own."""

    def train_dataloader(self) -> Any:
        return loaders("max_size", (12, 4 + 4 * self.trainer.global_rank))


def test_orders_of_each_rank_of_other_lengths(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"loader 2 of 2, .* has \[2, 4\] batches on the ranks"):
        on_two_ranks(tmp_path / "ranks", OwnOrders, use_distributed_sampler=False)
    assert not (tmp_path / "ranks" / "stepped").exists()


def test_a_run_that_is_resumed_by_other_ranks(tmp_path):
    """The samples that are left may be a number that the ranks can't share; or one that they can."""
    path = tmp_path / "saved"
    engine(callbacks=[SavesIn("on_train_batch_end", 1, path)]).fit(Sums(), loaders("max_size", (14, 6), batch_size=1))
    with pytest.raises(
        ProcessRaisedException, match=r"loader 1 of 2, .* has 1 samples .* Resume with the former number"
    ):
        on_two_ranks(tmp_path / "odd", lambda: loaders("max_size", (14, 6)), ckpt_path=path)
    assert not (tmp_path / "odd" / "stepped").exists()
    engine(callbacks=[SavesIn("on_train_batch_end", 1, path)]).fit(Sums(), loaders("max_size", (14, 6)))
    ranks = on_two_ranks(tmp_path / "even", lambda: loaders("max_size", (14, 6)), ckpt_path=path, max_epochs=1)
    for number, size in enumerate((14, 6)):
        assert sorted(i for rank in ranks for step in rank["seen"] for i in step[number]) == list(range(2, size))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation(mode, tmp_path):
    with pytest.raises(
        ProcessRaisedException, match="One of 2 loaders that are evaluated side by side has fewer samples"
    ):
        on_two_ranks(tmp_path / "ranks", lambda: loaders(mode, (12, 5) if mode != "min_size" else (5, 12)), "validate")
    for sizes in ((12, 6), (5, 5)):
        ranks = on_two_ranks(tmp_path / str(sizes[1]), lambda sizes=sizes: loaders(mode, sizes), "validate")
        seen = sorted(i for rank in ranks for step in rank["seen"] for i in step[0])
        assert seen == list(range(8 if mode == "min_size" and sizes == (12, 6) else sizes[0]))


class InTurn(Sums):
    """Evaluates one loader after the other."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.seen.append([dataloader_idx, batch.tolist()])


def test_loaders_that_are_evaluated_one_after_the_other(tmp_path):
    """No step has a batch of both, so that each may have any number of samples."""
    loader = loaders("sequential", (12, 5))
    trainer = engine(strategy="ddp_fork", devices=2)
    trainer.validate(InTurn(tmp_path), loader, verbose=False)
    seen = [item for rank in range(2) for item in json.loads((tmp_path / f"{rank}").read_text())["seen"]]
    for number, size in enumerate((12, 5)):
        assert sorted(i for of, batch in seen if of == number for i in batch) == list(range(size))


def test_streams_that_are_evaluated_side_by_side():
    with pytest.warns(UserWarning, match="Streams are evaluated side by side"):
        check_evaluated_side_by_side(
            combined("max_size", a=as_uneven_eval(DataLoader(Stream(3)), list, None), b=rows())
        )
