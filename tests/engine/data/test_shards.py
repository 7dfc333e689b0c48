"""Streams with shards are gone on with by other ranks, workers and batch sizes: each sample once."""

import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine.data.shards import ShardedStream, remaining_shards, why_not_shardable
from tests.pairs import alternating

from ..tiny import SavesIn, engine
from . import runs, sharded
from .runs import assert_goes_on, train
from .sharded import EACH, SIZES, Notes, Sharded, Stated, is_once, run

STOP = 4


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


def loader(cls=Sharded, batch_size=3, num_workers=0, **how: Any) -> DataLoader:
    return DataLoader(cls(**how), batch_size=batch_size, num_workers=num_workers)


@pytest.mark.parametrize("cls", [Sharded, Stated])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_once_however_often_the_number_of_ranks_changes(cls, seed):
    draw, left, seen = random.Random(seed), None, []
    while left != []:
        num = draw.randint(1, 5)
        ranks = [ShardedStream(cls(), num, rank) for rank in range(num)]
        for rank in ranks:
            rank.deal_next(None if left is None else rank.deal(left, 0))
            rank.begin_epoch()
        states = []
        for rank in ranks:
            samples = iter(rank)
            seen += islice(samples, draw.randint(0, 4))
            state = {"state": {"dataset_state": rank.state_dict()}, "ended": False}
            states.append({"num_workers": 0, "state": state, "shards": {"dealt": rank.dealt}})
        left = remaining_shards(states, len(SIZES))
    assert sorted(seen) == sorted(EACH)


def test_one_process_reads_as_the_data_set_itself():
    assert list(ShardedStream(Sharded(), 1, 0)) == list(Sharded())


@pytest.mark.parametrize(
    ("cls", "num_workers", "at", "flags"),
    [(Stated, 0, 2, {}), (Sharded, 0, 4, {"accumulate_grad_batches": 3}), (Stated, 2, 2, {}), (Sharded, 2, 3, {})],
)
def test_the_same_ranks_go_on_exactly(cls, num_workers, at, flags, tmp_path):
    assert_goes_on(lambda: loader(cls, num_workers=num_workers), tmp_path, at, **flags)


@pytest.mark.parametrize(
    ("cls", "persistent", "then", "now"),
    alternating(
        [(Sharded, False), (Stated, True)],
        [((3, 0), (3, 2)), ((3, 2), (3, 1)), ((4, 2), (1, 0)), ((3, 0), (4, 0))],
    ),
)
def test_other_workers_and_other_batch_sizes(cls, persistent, then, now, tmp_path):
    def make(batch_size: int = 3, num_workers: int = 0) -> DataLoader:
        keeps = persistent and num_workers > 0
        return DataLoader(cls(), batch_size, num_workers=num_workers, persistent_workers=keeps)

    saves = SavesIn("on_train_batch_end", STOP, tmp_path / "saved")
    done = train(lambda: make(*then), max_epochs=1, callbacks=[saves])[:STOP]
    rest = train(lambda: make(*now), tmp_path / "saved", max_epochs=4)
    assert is_once([(epoch, batch) for epoch, _, batch in done + rest])


def test_it_is_stopped_twice(tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    saves = SavesIn("on_train_batch_end", 3, first)
    done = train(loader, callbacks=[saves])[:3]
    done += train(lambda: loader(num_workers=2), first, callbacks=[SavesIn("on_train_batch_end", 3, second)])[:3]
    for batch_size, num_workers in [(3, 2), (5, 0)]:
        rest = train(lambda: loader(batch_size=batch_size, num_workers=num_workers), second, max_epochs=4)  # noqa: B023
        assert is_once([(epoch, batch) for epoch, _, batch in done + rest])


class Shuffled(Sharded):
    """Its shards are in another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Sharded:
        order = random.Random(self.epoch).sample(self.indices, len(self.indices))
        return Sharded(order[index::num_shards])


class TellsEpoch(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


def test_a_stream_that_is_told_its_epoch(tmp_path):
    saves = SavesIn("on_train_batch_end", 15, tmp_path / "saved")  # in the second of 12 batches each
    whole = train(lambda: loader(Shuffled), max_epochs=4, callbacks=[saves, TellsEpoch()])
    assert len({str([batch for of, _, batch in whole if of == epoch]) for epoch in range(4)}) == 4
    assert train(lambda: loader(Shuffled), tmp_path / "saved", max_epochs=4, callbacks=[TellsEpoch()]) == whole[15:]
    other = {"batch_size": 4, "num_workers": 2}
    rest = train(lambda: loader(Shuffled, **other), tmp_path / "saved", max_epochs=4, callbacks=[TellsEpoch()])
    assert is_once([(epoch, batch) for epoch, _, batch in whole[:15] + rest])


@pytest.mark.parametrize("cls", [Sharded, Stated])
def test_finished_shards_are_not_read_again(cls, tmp_path):
    log = tmp_path / "log"
    train(lambda: loader(cls), max_epochs=1, callbacks=[SavesIn("on_train_batch_end", 7, tmp_path / "saved")])
    train(lambda: loader(cls, batch_size=1, log=log), tmp_path / "saved", max_epochs=1)
    read = [int(line) for line in log.read_text().splitlines()]
    taken = 7 * 3  # of the sixth shard, which begins with sample 17
    assert read == list(range(17 if cls is Sharded else taken, EACH.total()))


class Mixes(Sharded):
    shards_in_order = False


class Sized(Sharded):
    def __len__(self) -> int:
        return sum(SIZES) * len(self.indices) // len(SIZES)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [(Mixes, "Mixes doesn't say `shards_in_order = True`"), (Sized, "Sized has a `__len__`")],
)
def test_what_cannot_be_dealt_anew_is_refused_with_the_reason(cls, reason, tmp_path):
    assert reason in why_not_shardable(cls())
    train(lambda: loader(cls), callbacks=[SavesIn("on_train_batch_end", STOP, tmp_path / "saved")])
    with pytest.raises(
        ValueError, match=rf"can't continue from: {reason}.* at the end of an epoch.*streams-with-shards"
    ):
        train(lambda: loader(cls, batch_size=4), tmp_path / "saved")


def test_other_shards_and_other_loaders_beside_it_are_refused(tmp_path):
    two = {"a": loader(), "b": loader()}
    train(loader, callbacks=[SavesIn("on_train_batch_end", STOP, tmp_path / "one")])
    train(lambda: two, callbacks=[SavesIn("on_train_batch_end", STOP, tmp_path / "two")])
    with pytest.raises(ValueError, match=r"positions in 8 shards, but .* has 6: use the same data"):
        train(lambda: loader(indices=list(range(6))), tmp_path / "one")
    with pytest.raises(ValueError, match="beside other training loaders, whose shards can't be distributed again"):
        train(lambda: {"a": loader(batch_size=4), "b": loader()}, tmp_path / "two")
    with pytest.raises(ValueError, match="it was read shard by shard, and this run's loader is not"):
        train(lambda: loader(Mixes, batch_size=4), tmp_path / "one")


def test_a_checkpoint_of_a_run_that_did_not_read_shard_by_shard_goes_on_as_it_was(tmp_path):
    saves = SavesIn("on_train_batch_end", STOP, tmp_path / "saved")
    whole = train(lambda: loader(Mixes, num_workers=2), callbacks=[saves])
    assert train(lambda: loader(num_workers=2), tmp_path / "saved") == whole[STOP:]
    with pytest.raises(ValueError, match="in the run that saved the checkpoint it was not read shard by shard"):
        train(lambda: loader(batch_size=4), tmp_path / "saved")


def test_a_shard_that_has_become_shorter_is_an_error(tmp_path, monkeypatch):
    train(loader, callbacks=[SavesIn("on_train_batch_end", 7, tmp_path / "saved")])
    monkeypatch.setattr(sharded, "SIZES", [5, 0, 7, 1, 4, 2, 3, 6])
    with pytest.raises(ValueError, match="Shard 5 of Sharded has fewer than the 4 samples that were taken of it"):
        train(lambda: loader(batch_size=4), tmp_path / "saved")


@pytest.mark.parametrize(("then", "stop"), [(1, 4), (2, 6)])
def test_other_ranks(then, stop, tmp_path):
    """After 6 batches one of two ranks is through, and what is left is no batch for each of three."""
    saved = tmp_path / "saved"
    saves = SavesIn("on_train_batch_end", stop, saved)
    whole = run(tmp_path / "whole", lambda: loader(num_workers=then - 1), then, max_epochs=1, callbacks=[saves])
    done = [batch for of_rank in whole for batch in of_rank[:stop]]
    assert [len(of_rank[:stop]) for of_rank in whole] == ([4] if then == 1 else [5, 6])
    for ranks, num_workers in [(2, 0)] if then == 1 else [(1, 2), (3, 0)]:
        rest = run(tmp_path / f"{ranks}", lambda: loader(num_workers=num_workers, batch_size=2), ranks, saved)  # noqa: B023
        assert is_once(done + [batch for of_rank in rest for batch in of_rank]), ranks


class ByTheClock(Sharded):
    """Its shards are in an order that no checkpoint has."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        return iter(random.Random(time.time_ns()).sample(numbers, len(numbers)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_draws_another_order_when_it_is_read_again_is_refused(num_workers, tmp_path):
    train(lambda: loader(ByTheClock), callbacks=[SavesIn("on_train_batch_end", 7, tmp_path / "saved")])
    with pytest.raises(ValueError, match=r"A shard of ByTheClock has no `state_dict`, .* has yielded other batches"):
        train(lambda: loader(ByTheClock, num_workers=num_workers), tmp_path / "saved")


class Noisy(Sharded):
    """Its samples are augmented from a generator that the training draws from, too."""

    def __iter__(self) -> Iterator[Any]:
        return (number + torch.rand(()) / 2 for number in super().__iter__())


class AlsoDraws(runs.Trains):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.rand(())
        return super().training_step(batch, batch_idx)


def test_a_shard_whose_draws_others_have_a_part_in_is_warned_of_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "Trains", AlsoDraws)
    whole = train(lambda: loader(Noisy), callbacks=[SavesIn("on_train_batch_end", 7, tmp_path / "saved")])
    with pytest.warns(UserWarning, match=r"Shard 5 of Noisy has no `state_dict`.* if they decide which samples come"):
        rest = train(lambda: loader(Noisy), tmp_path / "saved")
    assert rest == whole[7:]


class Learns(Notes):
    """Regresses on the numbers; leaves its weights behind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(0)
        del self.weight
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.current_epoch, batch.tolist()))
        numbers = batch[:, None] / EACH.total()
        return (self.net(numbers) - numbers.sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)


@pytest.mark.parametrize("strategy", ["fsdp_fork", "ddp_fork"])
def test_a_rank_that_has_nothing_left_takes_part_with_a_batch_that_counts_for_nothing(strategy, tmp_path):
    """Three samples of one shard are left of the epoch, so that the second rank has none."""

    def train_on(checkpoint: Path | None = None, **flags: Any) -> dict[str, Tensor]:
        seed_everything(7, verbose=False)
        module = Learns(tmp_path)
        engine(max_epochs=1, **flags).fit(module, loader(batch_size=4), ckpt_path=checkpoint)
        return {name: value.clone() for name, value in module.state_dict().items()}

    whole = train_on(callbacks=[SavesIn("on_train_batch_end", 8, tmp_path / "saved.ckpt")])
    rest = train_on(tmp_path / "saved.ckpt", strategy=strategy, devices=2)
    first, second = (json.loads((tmp_path / f"{rank}").read_text()) for rank in range(2))
    assert first == [[0, [32, 33, 34]]]
    assert len(second) in (0, 1)
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, rtol=0, atol=1e-6)
