"""Batches that are run for their collectives only leave no trace; streams end together."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from polyphase.engine.checkpoint import get_random_state
from polyphase.engine.distributed.object_group import WORLD
from tests.distributed import run_ranks

from ..tiny import Positions, Seen, Stream, as_rank, engine
from .test_data_connector import Pairs

# The modules count their samples in buffers.
pytestmark = pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")


class Leaves(Seen):
    """Changes all it can in each step, in which the ranks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.by_rank: dict[int, list[int]] = {}
        self.metric = MeanMetric()
        self.count = 0
        self.register_buffer("total", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        together = torch.ones(())
        dist.all_reduce(together)
        assert together == dist.get_world_size(), "all ranks are in this step"
        self.seen.append(batch.tolist())
        self.by_rank.setdefault(self.global_rank, []).extend(batch.tolist())
        self.metric.update(batch.float())
        self.count += 1
        self.total += batch.sum()
        torch.rand(3)
        self.log("mean", batch.float().mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("metric", self.metric)

    def predict_step(self, batch, batch_idx):
        self.seen.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        dist.barrier()
        torch.rand(3)
        return batch


class Hooks(Callback):
    """Notes what it is told of, and the random state around all batches."""

    def __init__(self):
        self.batches, self.states = [], []

    def on_validation_epoch_start(self, *_):
        self.states.append(get_random_state())

    def on_validation_epoch_end(self, trainer, module):
        self.states.append(get_random_state())
        self.left = copy.deepcopy(
            (module.seen, module.by_rank, module.count, module.total.item(), module.metric.metric_state)
        )

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(batch_idx)


def only_padding(rank):
    as_rank(rank)
    torch.manual_seed(0)
    for strategy in ("ddp", "ddp:broadcast_buffers=false"):
        hooks, module = Hooks(), Leaves()
        trainer = engine(strategy=strategy, devices=3, callbacks=[hooks])
        (found,) = trainer.validate(module, DataLoader(Positions(2), batch_size=4), verbose=False)
        assert found["metric"] == found["mean_epoch"] == 0.5
        seen, by_rank, count, total, metric = hooks.left
        if rank < 2:
            assert (seen, by_rank, count, hooks.batches) == ([[rank]], {rank: [rank]}, 1, [0, 0])
            continue
        assert (seen, by_rank, count, total, hooks.batches) == ([], {}, 0, 0, [])
        assert metric == MeanMetric().metric_state
        assert hooks.states[0]["python"] == hooks.states[1]["python"]
        assert torch.equal(hooks.states[0]["torch"], hooks.states[1]["torch"])


def padding_after_other_batches(rank):
    as_rank(rank)
    hooks, module = Hooks(), Leaves()
    trainer = engine(strategy="ddp", devices=2, callbacks=[hooks])
    (found,) = trainer.validate(module, DataLoader(Positions(9), batch_size=2), verbose=False)
    assert found["metric"] == found["mean_epoch"] == 4
    assert module.seen == ([[0, 1], [4, 5], [8]] if rank == 0 else [[2, 3], [6, 7]])
    assert trainer.validate_loop.batch_progress.current.completed == 3, "the ranks are as far as each other"


def batches_of_the_users(rank):
    as_rank(rank)
    module = Leaves()
    loaders = DataLoader(Positions(6), batch_sampler=Pairs(range(6))), DataLoader(Positions(3), batch_size=None)
    engine(strategy="ddp", devices=2).validate(module, loaders[0], verbose=False)
    assert module.seen == ([[0, 1], [4, 5]] if rank == 0 else [[2, 3]])
    module = Leaves()
    engine(strategy="ddp", devices=2).predict(module, loaders[1])
    assert module.seen == ([0, 2] if rank == 0 else [1])


def validation_within_fit(rank):
    as_rank(rank)

    class Fits(Leaves):
        def on_validation_epoch_end(self):
            everyones = WORLD.all_gather_object(self.seen)
            assert sorted(i for seen in everyones for batch in seen for i in batch) == list(range(self.num_expected))
            self.seen.clear()
            self.num_expected = 7

    module = Fits()
    module.num_expected = 4  # of the sanity check, which stops after two batches of one sample on each rank
    trainer = engine(strategy="ddp", devices=2, max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(module, DataLoader(Positions(4)), DataLoader(Positions(7)))
    assert trainer.callback_metrics["mean_epoch"] == 3


def an_empty_data_set(rank):
    as_rank(rank)
    trainer = engine(strategy="ddp", devices=2)
    said = pytest.warns(UserWarning, match="Total length of `DataLoader` across ranks is zero")
    with said if rank == 0 else nullcontext():
        assert trainer.validate(Leaves(), DataLoader(Positions(0)), verbose=False) == []


def a_step_that_fetches_for_itself(rank):
    as_rank(rank)

    class Fetches(Seen):
        def validation_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            self.log("mean", batch.float().mean(), sync_dist=True, batch_size=len(batch))

    warned = pytest.warns(UserWarning, match=r"`validation_step` with a `dataloader_iter` .* evaluated twice")
    with warned if rank == 0 else nullcontext():
        engine(strategy="ddp", devices=2).validate(Fetches(), DataLoader(Positions(1)), verbose=False)


def loaders_side_by_side(rank):
    as_rank(rank)

    class Pair(Leaves):
        def validation_step(self, batch, batch_idx):
            self.seen.append([part.tolist() for part in batch])
            dist.barrier()
            self.log("mean", batch[0].float().mean(), sync_dist=True, batch_size=len(batch[0]))

    module = Pair()
    loaders = CombinedLoader([DataLoader(Positions(5), batch_size=2) for _ in range(2)], "max_size")
    (found,) = engine(strategy="ddp", devices=2).validate(module, loaders, verbose=False)
    assert module.seen == ([[[0, 1]] * 2, [[4]] * 2] if rank == 0 else [[[2, 3]] * 2])
    assert found["mean"] == 2


class Parts(Stream):
    """A stream that can be cut in parts, of which the first is the longest."""

    def shard(self, num_shards, index):
        return Range(range(index, self.size, num_shards))


class Range(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Own(Range):
    shards_itself = True


def streams(rank):
    as_rank(rank)
    for loader in (DataLoader(Parts(9), batch_size=1), DataLoader(Own(range(rank, 9, 2)), batch_size=1)):
        for stage in ("validate", "predict"):
            module = Leaves()
            flags = {"verbose": False} if stage == "validate" else {}
            found = getattr(engine(strategy="ddp", devices=2), stage)(module, loader, **flags)
            assert module.seen == [[i] for i in range(rank, 9, 2)]
            if stage == "predict":
                assert [batch.item() for batch in found] == list(range(9))
            else:
                assert found[0]["mean_epoch"] == found[0]["metric"] == 4


class Lacks(Own):
    """Has nothing for rank 1."""

    def __iter__(self):
        return iter(range(3 - 3 * dist.get_rank()))


@pytest.mark.timeout(60)
def test_a_rank_without_any_part_of_a_stream_ends_the_run():
    trainer = engine(strategy="ddp_fork", devices=2)
    with pytest.raises(Exception, match=r"An IterableDataset \(Lacks\) has no batch at all on rank\(s\) \[1\] of 2"):
        trainer.validate(Leaves(), DataLoader(Lacks(())), verbose=False)


def streams_that_know_their_length(rank):
    as_rank(rank)

    class Sized(Own):
        def __len__(self):
            return len(self.items)

    module = Leaves()
    trainer = engine(strategy="ddp", devices=2, limit_val_batches=0.5)
    trainer.validate(module, DataLoader(Sized(range(8 - 5 * rank))), verbose=False)
    assert len(module.seen) == 4 - rank, "half of the longest, of which the other has as much as there is"


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        (only_padding, 3),
        (padding_after_other_batches, 2),
        (batches_of_the_users, 2),
        (validation_within_fit, 2),
        (an_empty_data_set, 2),
        (a_step_that_fetches_for_itself, 2),
        (loaders_side_by_side, 2),
        (streams, 2),
        (streams_that_know_their_length, 2),
    ],
)
def test_evaluation(check, num_ranks):
    run_ranks(check, num_ranks, timeout_s=90, start_method="fork")
