"""A step's collectives are those of a loop written by hand with the same wrapper, and no more."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from polyphase.engine.distributed.buckets import equalise
from tests.distributed import run_ranks
from tests.pairs import alternating

from ..tiny import engine
from .costs import CallCount, Costs, num_collectives

NUM_BATCHES = 16
SETTLED = 8  # in its first steps DistributedDataParallel arranges its buckets, and two steps of fsdp are checked


class Logs(LightningModule):
    """Two layers (no repeated blocks, so one unit to shard), no buffers, two logged values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.first(x).tanh()).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self(batch[0])
        self.log("loss", loss, prog_bar=True)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)  # a collective when the epoch ends
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loop_by_hand(rank: int, strategy: str, window: int, folder: Path) -> None:
    module = Logs()
    model = DistributedDataParallel(module) if strategy == "ddp" else fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for batch in range(NUM_BATCHES):
        before = num_collectives()
        is_inner = (batch + 1) % window != 0
        if strategy == "fsdp":
            model.set_requires_gradient_sync(not is_inner)
        with model.no_sync() if strategy == "ddp" and is_inner else nullcontext():
            model(torch.randn(3, 4)).backward()
        if not is_inner:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(num_collectives() - before)
    dist.barrier()
    (folder / f"hand-{rank}.json").write_text(json.dumps(counts))


@pytest.mark.parametrize(("strategy", "window"), alternating(["ddp", "fsdp"], [1, 4]))
def test_collectives_are_those_of_a_loop_by_hand(strategy, window, tmp_path):
    costs = Costs(tmp_path)
    trainer = engine(
        strategy=f"{strategy}_fork",
        devices=2,
        accumulate_grad_batches=window,
        callbacks=[costs],
        logger=CSVLogger(tmp_path),  # to TensorBoard goes the norm of shards too, for one more at each logged step
        log_every_n_steps=3,
        default_root_dir=tmp_path,
    )
    trainer.fit(Logs(), DataLoader(TensorDataset(torch.randn(6 * NUM_BATCHES, 4)), batch_size=3))
    run_ranks(_loop_by_hand, 2, strategy, window, tmp_path)
    for rank in range(2):
        ours = json.loads((tmp_path / f"costs-{rank}.json").read_text())
        hand = json.loads((tmp_path / f"hand-{rank}.json").read_text())
        assert len(ours["collectives"]) == NUM_BATCHES
        # The last batch is followed by the end of the epoch.
        assert ours["collectives"][SETTLED:-1] == hand[SETTLED:-1]
        assert sum(hand[SETTLED:-1]) > 0, "the counter counts"
        if strategy == "ddp":
            expected = [int((batch + 1) % window == 0) for batch in range(NUM_BATCHES)]
            assert hand[SETTLED:] == expected[SETTLED:], "one bucket, and none on inner micro-batches"


def _made_equal(rank: int, folder: Path) -> None:
    module = torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(50)), torch.nn.Linear(1000, 1000))
    for tensor in module.state_dict().values():
        tensor.fill_(rank + 1)
    before = num_collectives()
    equalise(module, torch.device("cpu"))
    is_equal = all((tensor == 1).all() for tensor in module.state_dict().values())
    (folder / str(rank)).write_text(f"{num_collectives() - before} {is_equal}")


def test_small_tensors_are_made_equal_in_few_collectives(tmp_path):
    run_ranks(_made_equal, 2, tmp_path)
    # Of the small floats, the weight of the last layer, its bias, and the whole numbers.
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["4 True", "4 True"]


class Syncs(Logs):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, sync_dist=True)
        return loss


def test_a_log_call_that_adds_a_collective_to_each_step_is_named(tmp_path):
    handler = logging.FileHandler(tmp_path / "said")  # the forked ranks have it too
    logging.getLogger("polyphase.engine").addHandler(handler)
    trainer = engine(strategy="ddp_fork", devices=2, max_epochs=2)
    trainer.fit(Syncs(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=3))
    logging.getLogger("polyphase.engine").removeHandler(handler)
    handler.close()
    said = (tmp_path / "said").read_text()
    assert said.count("self.log('synced', ..., sync_dist=True) with on_step=True adds a collective to every step") == 1


FIRST, LAST = 20, 52


class Counted(Logs):
    """Counts the calls of its steps; writes them down at the end."""

    def __init__(self, folder: Path):
        super().__init__()
        self.calls, self.folder = CallCount(FIRST, LAST), folder

    def forward(self, x):
        self.calls.tick()
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0])

    def on_train_end(self):
        (self.folder / f"ours-{self.trainer.global_rank}.json").write_text(json.dumps(self.calls.per_step))


def _calls_by_hand(rank: int, folder: Path) -> None:
    module = Counted(folder)
    model, optimizer = DistributedDataParallel(module), module.configure_optimizers()
    data = TensorDataset(torch.randn(6 * (LAST + 10), 4))
    for batch in DataLoader(data, batch_size=3, sampler=DistributedSampler(data)):
        loss = model(batch[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    (folder / f"hand-{rank}.json").write_text(json.dumps(module.calls.per_step))


def test_a_step_of_ddp_makes_few_calls_more_than_a_loop_by_hand(tmp_path):
    trainer = engine(strategy="ddp_fork", devices=2)
    trainer.fit(Counted(tmp_path), DataLoader(TensorDataset(torch.randn(6 * (LAST + 10), 4)), batch_size=3))
    run_ranks(_calls_by_hand, 2, tmp_path)
    for rank in range(2):
        ours, hand = (json.loads((tmp_path / f"{who}-{rank}.json").read_text()) for who in ("ours", "hand"))
        # Some 120, and what is asked of the job's store once a second, which a slow machine spreads over fewer steps.
        # Of them Lightning's call of `Strategy.training_step` has 25.
        assert ours - hand <= 140
