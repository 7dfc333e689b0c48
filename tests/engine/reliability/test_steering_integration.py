"""What steers the loop on one rank: all ranks follow, or the run is refused; no rank waits for one that has left."""

import sys

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine.reliability import signals
from tests.distributed import ROOT, free_port, run_command

from ..tiny import Regression, engine

NUM_BATCHES = 40


@pytest.fixture(autouse=True)
def _decides_soon(monkeypatch):
    """The forked ranks have these values, too."""
    monkeypatch.setattr(signals, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(signals, "_PERIOD_S", 0.1)


class Net(Regression):
    def __init__(self, automatic=True):
        super().__init__()
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch[0], batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer.step()

    def validation_step(self, batch, batch_idx):
        pass


class Steers(Callback):
    """Calls `steer` with the trainer on `ranks`, in the hook `place`; notes where training ends."""

    def __init__(self, folder, place, steer, ranks=(1,)):
        self.folder, self.place, self.steer, self.ranks = folder, place, steer, ranks

    def reach(self, place, trainer):
        if place == self.place and trainer.global_rank in self.ranks:
            self.steer(trainer)

    def on_train_start(self, trainer, pl_module):
        self.reach("on_train_start", trainer)

    def on_train_epoch_start(self, trainer, pl_module):
        self.reach("on_train_epoch_start", trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.reach("on_train_batch_end", trainer)

    def on_validation_end(self, trainer, pl_module):
        self.reach("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.reach("on_train_epoch_end", trainer)

    def on_train_end(self, trainer, pl_module):
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in pl_module.parameters()]
        torch.save((trainer.global_step, weights), self.folder / str(trainer.global_rank))


def stop(trainer):
    trainer.should_stop = True


def run(folder, place, steer, *, strategy="ddp", automatic=True, module=None, **flags):
    """Trains on two ranks; returns the step at which both have stopped, with equal weights."""
    ranks = flags.pop("ranks", (1,))
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(2 * NUM_BATCHES, 4)), batch_size=1)
    trainer = engine(
        strategy=f"{strategy}_fork",
        num_sanity_val_steps=0,
        devices=2,
        callbacks=[Steers(folder, place, steer, ranks)],
        **{"max_epochs": 3, **flags},
    )
    trainer.fit(module or Net(automatic), data, DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=1))
    (step, weights), (others_step, others) = (torch.load(folder / str(rank)) for rank in range(2))
    assert step == others_step
    assert strategy == "local_sgd" or all(map(torch.equal, weights, others))  # it averages at the very end
    return step


@pytest.mark.parametrize(
    ("strategy", "automatic"), [("ddp", True), ("ddp", False), ("zero1", True), ("fsdp", True), ("local_sgd", True)]
)
def test_one_rank_stops_all_in_mid_epoch(strategy, automatic, tmp_path):
    step = run(tmp_path, "on_train_batch_end", stop, strategy=strategy, automatic=automatic)
    assert 4 <= step < NUM_BATCHES


@pytest.mark.parametrize("automatic", [True, False], ids=["flat", "Lightning's loop"])
def test_if_all_ranks_stop_at_a_batch_it_is_the_last_one(automatic, tmp_path):
    assert run(tmp_path, "on_train_batch_end", stop, automatic=automatic, ranks=(0, 1)) == 4


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("on_train_start", 0),
        ("on_train_epoch_start", 0),
        ("on_validation_end", NUM_BATCHES // 2),
        ("on_train_epoch_end", NUM_BATCHES),
    ],
)
def test_one_rank_stops_all_between_batches(place, step, tmp_path):
    assert run(tmp_path, place, stop, val_check_interval=0.5) == step


def change_limit(name, value):
    return lambda trainer: setattr(trainer.fit_loop.epoch_loop if "steps" in name else trainer.fit_loop, name, value)


@pytest.mark.parametrize(
    ("place", "name", "value"), [("on_train_batch_end", "max_steps", 6), ("on_train_epoch_end", "max_epochs", 1)]
)
def test_a_limit_that_one_rank_changes_is_refused_by_name(place, name, value, tmp_path):
    with pytest.raises(Exception, match=f"{name}.*Change it on all ranks alike"):
        run(tmp_path, place, change_limit(name, value))


@pytest.mark.parametrize(
    ("place", "name", "value", "step"),
    [("on_train_batch_end", "max_steps", 6, 6), ("on_train_epoch_end", "max_epochs", 1, NUM_BATCHES)],
)
def test_a_limit_that_all_ranks_change_counts(place, name, value, step, tmp_path):
    assert run(tmp_path, place, change_limit(name, value), ranks=(0, 1)) == step


class Cancels(Net):
    """Cancels each epoch at its third batch."""

    def __init__(self, ranks, automatic):
        super().__init__(automatic)
        self.ranks = ranks

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 and self.trainer.global_rank in self.ranks else None


@pytest.mark.parametrize("automatic", [True, False], ids=["flat", "Lightning's loop"])
def test_an_epoch_that_one_rank_cancels_is_refused_by_name(automatic, tmp_path):
    with pytest.raises(Exception, match="`on_train_batch_start` has returned -1 on rank 1"):
        run(tmp_path, None, stop, module=Cancels((1,), automatic))


def test_an_epoch_that_all_ranks_cancel_ends(tmp_path):
    assert run(tmp_path, None, stop, module=Cancels((0, 1), automatic=True)) == 3 * 2


BY_HAND = """
from tests.engine.reliability.test_steering_integration import Changes
from tests.engine.tiny import Regression, engine, rows

trainer = engine(strategy="ddp", num_nodes=2, max_epochs=2, callbacks=[Changes()])
trainer.fit(Regression(), rows(32))
print("trained to step", trainer.global_step)
"""
BOTH_NODES = """
for node in 0 1; do env NODE_RANK=$node MASTER_ADDR=127.0.0.1 MASTER_PORT=$1 "$2" -c "$3" & nodes="$nodes $!"; done
for node in $nodes; do wait $node; echo "ended with $?"; done
"""


class Changes(Callback):
    """Changes a limit on all ranks, which they then compare by the job's store."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 0:
            trainer.fit_loop.max_epochs = 3


def test_nodes_that_are_started_by_hand_believe_each_other():
    """Each has the secret of its own ranks to make, which the other node's ranks don't have."""
    command = ["sh", "-c", BOTH_NODES, "sh", str(free_port()), sys.executable, BY_HAND]
    finished = run_command(command, timeout_s=100, cwd=ROOT)
    assert finished.output.count("ended with 0\n") == 2, finished.output
    assert finished.output.count("trained to step 12\n") == 2, finished.output
    assert "no rank of this job has written it" not in finished.output
