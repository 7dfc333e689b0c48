"""`ReplicaGuard` in real runs of two ranks: drifted weights end them, and right ones are left alone."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, IterableDataset

from polyphase.callbacks import ReplicaGuard
from polyphase.engine import Engine
from polyphase.engine.strategies.tensor.strategy import TensorParallel
from tests.engine.parity import build, loader
from tests.engine.strategies.test_ddp_integration import QUIET


class Drift(Callback):
    """Changes one weight on rank 1 before the third step: the engine itself compares those of the first two."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.net[2].weight[0, 0] += 1e-3


class Counts(Callback):
    """Compares the number of checks with that of the steps at which one is due, in each rank."""

    def __init__(self, guard, expected):
        self.guard, self.expected = guard, expected

    def on_train_end(self, trainer, pl_module):
        assert self.guard.num_checks == self.expected


def run(strategy, callbacks, model="mlp", max_steps=4, data=None):
    seed_everything(0, verbose=False)
    module = build(model)
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=max_steps,
        log_every_n_steps=3,
        callbacks=callbacks,
        **QUIET,
    )
    engine.fit(module, loader(model, 1, 2) if data is None else data)
    return copy.deepcopy(module.state_dict())


def test_a_weight_that_differs_on_one_rank_ends_the_run_in_its_third_step():
    with pytest.raises(ProcessRaisedException, match=r"same weights of MLP.*'net\.2\.weight'.*polyphase verify"):
        run("ddp_fork", [Drift(), ReplicaGuard()])


def not_added_up(self):
    """What a rank has of a gradient counts as all of it."""
    for p in self._replicated:
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements, run_check=False)


def test_gradients_of_whole_parameters_that_tp_does_not_add_up_end_the_run(monkeypatch):
    monkeypatch.setattr(TensorParallel, "_reduce_replicated_gradients", not_added_up)
    with pytest.raises(ProcessRaisedException, match=r"same weights of TiedGPT.*norm.*polyphase verify"):
        run("tp_fork:sequence_parallel=true", [ReplicaGuard()], model="gpt, tied")


@pytest.mark.parametrize(("strategy", "model"), [("ddp_fork", "mlp"), ("tp_fork:sequence_parallel=true", "gpt, tied")])
def test_a_right_run_is_the_same_bit_for_bit(strategy, model):
    guard = ReplicaGuard()
    watched = run(strategy, [guard, Counts(guard, 3)], model)  # steps 1, 2 and 3
    plain = run(strategy, [], model)
    assert all(torch.equal(watched[name], tensor) for name, tensor in plain.items())


class Uneven(IterableDataset):
    """Two samples on rank 0, and one on rank 1."""

    index = 0

    def shard(self, num_shards, index):
        self.index = index
        return self

    def __iter__(self):
        return iter([(torch.ones(8, 8), 1)] * (2 - self.index))


@pytest.mark.parametrize(
    ("strategy", "data"), [("zero1_fork", None), ("ddp_fork", DataLoader(Uneven(), 1))], ids=["zero1", "uneven"]
)
def test_what_it_cannot_compare_is_left_alone(strategy, data):
    guard = ReplicaGuard()
    run(strategy, [guard, Counts(guard, 0)], max_steps=2, data=data)
