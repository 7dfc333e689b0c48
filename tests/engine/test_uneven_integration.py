"""Ranks with different numbers of batches of their own end the epoch together, and every sample counts as any other."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyphase.engine import Engine
from tests.pairs import nightly, paired

from .parity import TOLERANCE, largest_difference, sgd, suffixed
from .tiny import QUIET, Saves

# Each rank counts its own samples in a buffer of the modules here, to show what a filler or a repeated step leaves.
pytestmark = pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")

INPUTS = torch.randn(100, 6, generator=torch.Generator().manual_seed(2))
SIZES = [7, 3, 12]
"""Samples of each rank: with batches of two, 4, 2 and 6 of them."""
BATCH = 2


def part_of(rank: int, sizes: list[int]) -> list[int]:
    first = sum(sizes[:rank])
    return list(range(first, first + sizes[rank]))


class Parts(IterableDataset[tuple[int, Tensor]]):
    """Reads what is its rank's."""

    shards_itself = True

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter([(i, INPUTS[i]) for i in part_of(dist.get_rank(), self.sizes)])


class Folders(Dataset[tuple[int, Tensor]]):
    """The same with a length."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return self.sizes[dist.get_rank()]

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        number = part_of(dist.get_rank(), self.sizes)[index]
        return number, INPUTS[number]


class Fits(LightningModule):
    """Writes down which samples each step had on this rank, and what BatchNorm has counted."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("count", torch.zeros(()))
        self.folder = folder
        self.seen: dict[int, list[int]] = defaultdict(list)

    def loss(self, inputs: Tensor) -> Tensor:
        return (self.net(inputs).squeeze(1) - inputs.sum(1).sin()).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        numbers, inputs = batch
        self.seen[self.trainer.global_step] += numbers.tolist()
        self.count += len(numbers)
        self.log("mean", inputs.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return self.loss(inputs)

    def on_train_end(self) -> None:
        logged = float(self.trainer.callback_metrics["mean"])
        (self.folder / f"{self.trainer.global_rank}.json").write_text(json.dumps([self.seen, logged]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Weighs(Fits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": len(batch[0])}


def steps_of(sizes: list[int], accumulate: int, policy: str) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    batches = [[part_of(r, sizes)[i : i + BATCH] for i in range(0, sizes[r], BATCH)] for r in range(len(sizes))]
    num = (min if policy == "drop" else max)(map(len, batches))
    rounds = [[i for of_rank in batches if k < len(of_rank) for i in of_rank[k]] for k in range(num)]
    return [sorted(i for part in rounds[k : k + accumulate] for i in part) for k in range(0, num, accumulate)]


def plain_loop(steps: list[list[int]]) -> dict[str, Tensor]:
    module = Fits()
    optimizer = sgd(module)
    for samples in steps:
        optimizer.zero_grad()
        module.loss(INPUTS[samples]).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def fit(module: Fits, flag: str, data: Any, ckpt_path: Path | None = None, **flags: Any) -> None:
    devices = len(data.sizes)
    engine = Engine(strategy=suffixed(flag, "fork"), devices=devices, **{"max_epochs": 1, **QUIET, **flags})
    engine.fit(module, DataLoader(data, batch_size=BATCH), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("flag", "policy", "data", "accumulate", "cls"),
    paired(
        [("ddp", "pad"), ("ddp", "drop"), ("fsdp", "pad"), ("fsdp", "drop")],
        [Parts, Folders],
        [1, 2],
        [Fits, Weighs],
    ),
)
def test_each_sample_counts_as_any_other(flag, policy, data, accumulate, cls, tmp_path):
    steps = steps_of(SIZES, accumulate, policy)
    module = cls(tmp_path)
    own = {"use_distributed_sampler": False} if data is Folders else {}
    fit(module, flag, data(SIZES), uneven=policy, accumulate_grad_batches=accumulate, **own)
    found = {name: tensor for name, tensor in module.state_dict().items() if name != "count"}
    assert largest_difference(found, plain_loop(steps)) <= TOLERANCE
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(SIZES))]
    seen = [sorted(i for of_rank, _ in ranks for i in of_rank.get(str(k), [])) for k in range(len(steps))]
    assert seen == steps
    every = [i for step in steps for i in step]
    for _, logged in ranks:
        assert logged == pytest.approx(float(INPUTS[every].mean()), abs=1e-6)


def test_more_than_one_epoch_in_16_bit(tmp_path):
    fit(Fits(tmp_path), "ddp", Parts(SIZES), max_epochs=3, precision="16-mixed")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text())[0] for rank in range(len(SIZES))]
    assert max(map(int, ranks[2])) == 17


class Sharded(IterableDataset[tuple[int, Tensor]]):
    """Has its parts made by the engine."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.sizes = [len(numbers[rank::3]) for rank in range(3)]

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return iter([(i, INPUTS[i]) for i in self.numbers])


@pytest.mark.parametrize("num_workers", [1, *nightly(0)])
def test_a_stream_that_can_be_shared_out_is(num_workers, tmp_path):
    module = Fits(tmp_path)
    engine = Engine(strategy="ddp_fork", devices=3, max_epochs=2, **QUIET)
    engine.fit(module, DataLoader(Sharded(list(range(20))), batch_size=BATCH, num_workers=num_workers))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text())[0] for rank in range(3)]
    seen = sorted(i for rank in ranks for numbers in rank.values() for i in numbers)
    assert seen == sorted([*range(20)] * 2)


class Whole(Sharded):
    shard = None  # type: ignore[assignment]


def test_a_stream_that_all_ranks_would_read_whole_is_refused(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"Each of the 2 ranks would read all of Whole.*`shard\("):
        Engine(strategy="ddp_fork", devices=2, max_epochs=1, **QUIET).fit(
            Fits(tmp_path), DataLoader(Whole(list(range(8))), batch_size=BATCH)
        )


def test_it_is_read_whole_if_the_user_says_so(tmp_path):
    stream = Whole(list(range(8)))
    stream.shards_itself = False
    Engine(strategy="ddp_fork", devices=2, max_epochs=1, **QUIET).fit(
        Fits(tmp_path), DataLoader(stream, batch_size=BATCH)
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text())[0] for rank in range(2)]
    assert [sorted(i for numbers in rank.values() for i in numbers) for rank in ranks] == [list(range(8))] * 2


def resumed(folder: Path, step: int) -> list[list[int]]:
    """Samples of each step of an epoch that is stopped after `step` and gone on with."""
    saved = folder / "saved"
    fit(Fits(folder), "ddp", Parts(SIZES), max_steps=step, callbacks=[Saves(saved, step)])
    steps = []
    for until in (step, 6):
        if until == 6:
            fit(Fits(folder), "ddp", Parts(SIZES), ckpt_path=saved)
        ranks = [json.loads((folder / f"{rank}.json").read_text())[0] for rank in range(3)]
        steps += [sorted(i for seen in ranks for i in seen.get(str(k), [])) for k in range(len(steps), until)]
    return steps


def test_a_stream_is_gone_on_with(tmp_path):
    assert resumed(tmp_path, 1) == steps_of(SIZES, 1, "pad")


@pytest.mark.parametrize("step", [2, *nightly(3)])
def test_but_not_where_a_rank_was_through(step, tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"saved when rank\(s\) \[1\] had finished"):
        resumed(tmp_path, step)


def test_a_rank_without_any_batch_is_named(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"rank\(s\) \[1\] of 2 have no batch at all of Parts"):
        fit(Fits(tmp_path), "ddp", Parts([4, 0]))


class Strange(Fits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(INPUTS[:2])


class Words(Parts):
    def __iter__(self) -> Iterator[Any]:
        return iter(["a", "b", "c"])


def test_a_batch_whose_size_can_not_be_seen(tmp_path):
    loader = DataLoader(Words([3, 3]), batch_size=BATCH, collate_fn=lambda words: {"text": " ".join(words)})
    with pytest.raises(ProcessRaisedException, match=r"is unknown: the batch has no tensor(.|\n)*weight"):
        Engine(strategy="ddp_fork", devices=2, max_epochs=1, **QUIET).fit(Strange(tmp_path), loader)


class Named(Parts):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"name": str(i)} for i in part_of(dist.get_rank(), self.sizes)])


class Reads(Fits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers = [int(name) for name in batch["name"]]
        self.seen[self.trainer.global_step] += numbers
        self.log("mean", INPUTS[numbers].mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(numbers))
        return self.loss(INPUTS[numbers])


@pytest.mark.parametrize("accumulate", [2, *nightly(1)])
def test_strings_count_as_samples(accumulate, tmp_path):
    module = Reads(tmp_path)
    fit(module, "ddp", Named(SIZES), accumulate_grad_batches=accumulate)
    found = {name: tensor for name, tensor in module.state_dict().items() if name != "count"}
    assert largest_difference(found, plain_loop(steps_of(SIZES, accumulate, "pad"))) <= TOLERANCE


def test_an_unknown_policy_is_refused_with_the_closest_one():
    with pytest.raises(ValueError, match=r"unknown value of uneven 'padd'\. Did you mean 'pad'\?"):
        Engine(**{**QUIET, "devices": 1, "uneven": "padd"})
