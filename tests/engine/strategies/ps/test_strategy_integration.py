"""The parameter server through real runs: bounds, lost ranks, checkpoints, and where it listens."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from tests.distributed import run_command
from tests.engine.parity import MLP, TOLERANCE, TiedGPT, build, largest_difference, loader
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

SCRIPT = Path(__file__).parents[2] / "reliability" / "faulty_run.py"


def made(strategy: str, devices: int, **flags: object) -> Engine:
    return Engine(strategy=strategy, accelerator="cpu", devices=devices, **{**QUIET, **flags})


class Slow(MLP):
    """Rank 1 takes its time."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Seen(Callback):
    """Writes what rank 0's server has seen, and each rank's weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            (self.folder / "staleness.json").write_text(json.dumps(trainer.strategy.staleness))
        torch.save(pl_module.state_dict(), self.folder / f"{trainer.global_rank}.pt")


def test_no_rank_is_ahead_by_more_than_the_bound_and_all_end_alike(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    engine = made(
        "ps_fork:staleness=2", 3, max_epochs=1, logger=logger, log_every_n_steps=5, callbacks=[Seen(tmp_path)]
    )
    engine.fit(Slow().train(), loader("mlp", 1, 2))
    seen = {int(behind): number for behind, number in json.loads((tmp_path / "staleness.json").read_text()).items()}
    assert max(seen) == 2
    assert seen[2] > 5  # ranks 0 and 2 wait for rank 1
    assert sum(seen.values()) == 3 * len(loader("mlp", 1, 2)) // 3 + 2  # the last batches are partition to all
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "ps/staleness" in events.Tags()["histograms"]
    assert max(event.value for event in events.Scalars("ps/staleness_max")) == 2
    assert all(0 <= event.value <= 2 for event in events.Scalars("ps/staleness_mean"))
    weights = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    assert largest_difference(weights[0], weights[1]) == largest_difference(weights[0], weights[2]) == 0


@pytest.mark.parametrize(
    ("strategy", "trouble"),
    [("ps:servers=2", "raise"), ("ps_fork:servers=1", "kill"), *nightly(("ps:servers=1,staleness=2", "kill"))],
)
def test_a_rank_that_serves_nothing_may_die(strategy, trouble):
    finished = run_command([sys.executable, SCRIPT, strategy, "3", "2", trouble, "10"], timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert "[rank 0] rank(s) 2 have ended; the other 2 go on. Nobody trains on their samples: " in finished.output
    assert "of this epoch's samples, and 33% of those of each later epoch" in finished.output
    assert "rank 0 is done" in finished.output
    assert ("this rank has had enough" in finished.output) == (trouble == "raise")
    assert Path("snapshots/step=32").is_dir()
    assert not Path("failures").exists()


def test_a_rank_may_die_as_the_run_ends():
    # The others notice within a second, each for itself, and have to agree to take their connections down without it.
    finished = run_command([sys.executable, SCRIPT, "ps_fork:servers=1", "3", "2", "kill_late", "10"], timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert "[rank 0] rank(s) 2 have ended; the other 2 go on." in finished.output
    assert "rank 0 is done" in finished.output


class Lists(MLP):
    """Writes which samples each rank has trained on; rank 2 dies in its 13th batch if it is to."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies, self.seen = dies, []

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        if self.dies and self.global_rank == 2 and batch_idx == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen += batch.tolist()
        return self.net(batch[:, None] / 96 * torch.ones(64)).sum()

    def on_train_end(self):
        Path(f"seen{self.global_rank}.json").write_text(json.dumps(self.seen))


@pytest.mark.parametrize("resumed_by", ["ddp_fork", *nightly("ps_fork")])
def test_a_run_that_lost_a_rank_is_resumed_by_those_that_are_left(resumed_by):
    def listed(strategy: str, devices: int, *, dies: bool = False, **fit: object) -> list[list[float]]:
        seed_everything(3)
        snapshots = [Snapshot("snapshots", every_n_steps=20, keep_last=9)] if dies else []
        samples = DataLoader(torch.arange(96.0), batch_size=1, shuffle=True)
        made(strategy, devices, max_epochs=1, callbacks=snapshots).fit(Lists(dies), samples, **fit)
        return [json.loads(Path(f"seen{rank}.json").read_text()) for rank in range(2)]

    lost = listed("ps_fork:servers=1", 3, dies=True)
    assert [len(seen) for seen in lost] == [32, 32]  # a third of the epoch each, as before
    done = {sample for seen in lost for sample in seen[:20]}
    rest = listed(resumed_by, 2, ckpt_path="snapshots/step=20")
    assert [len(seen) for seen in rest] == [18, 18]  # of the 36 that nobody was to have had by step 20
    assert len({*rest[0], *rest[1]} - done) == 36


def test_the_end_of_a_server_ends_the_run():
    finished = run_command([sys.executable, SCRIPT, "ps:servers=2", "3", "1", "kill", "10"], timeout_s=60)
    assert finished.returncode not in (0, -9)
    assert "because of rank 1: its process has ended without an error message" in finished.output


class SaveAt(Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def run(strategy: str, **fit: object) -> dict:
    devices = 1 if strategy == "single" else 2
    callbacks = [] if fit else [SaveAt(Path("at9.ckpt"), 9)]
    module = build("mlp")
    engine = made(strategy, devices, max_epochs=1, callbacks=callbacks)
    engine.fit(module, loader("mlp", 1, devices), **fit)
    return module.state_dict()


@pytest.mark.parametrize(
    ("saved_by", "opened_by"),
    [
        ("ddp_fork", "ps_fork:servers=1"),
        ("ps_fork", "single"),
        ("ps_fork", "ps_fork"),
        *nightly(("single", "ps_fork"), ("ps_fork", "ddp_fork")),
    ],
)
def test_checkpoints_go_on_under_other_strategies(saved_by, opened_by):
    whole = run(saved_by)
    assert largest_difference(run(opened_by, ckpt_path="at9.ckpt"), whole) <= TOLERANCE


class Evaluated(MLP):
    """Logs through torchmetrics, and a BatchNorm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(10))
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.mean(loss, len(batch[0]))
        self.log("torchmetrics", self.mean)
        self.log("own", loss, sync_dist=True)
        self.log("spread", self._spread(), sync_dist=True, reduce_fx="max")

    def _spread(self):
        states = [*self.parameters(), self.net[-1].running_mean]
        tensors = self.all_gather(torch.cat([state.detach().flatten() for state in states]))
        return (tensors - tensors[0]).abs().max()


def test_all_ranks_evaluate_the_same_module():
    engine = made("ps_fork:staleness=3", 3, max_epochs=1, val_check_interval=5, limit_train_batches=10)
    engine.fit(Evaluated(), loader("mlp", 1, 2), loader("mlp", 1, 2))
    metrics = engine.callback_metrics
    assert metrics["spread"] == 0
    assert metrics["torchmetrics"] == pytest.approx(float(metrics["own"]), rel=1e-5)


class Weighed(TiedGPT):
    """Counts its bytes, and half of them in odd micro-batches."""

    def training_step(self, batch, batch_idx):
        batch = batch[:, : 9 if batch_idx % 2 else 17]
        return {"loss": super().training_step(batch, batch_idx), "weight": batch[:, 1:].numel()}


def test_what_a_step_counts_is_added_up_without_collectives():
    def trained(strategy: str, devices: int) -> dict:
        torch.manual_seed(1)
        module = Weighed(num_layers=2, num_heads=2, dim=16, context_length=16).train()
        engine = made(strategy, devices, max_epochs=1, accumulate_grad_batches=3, gradient_clip_val=0.05)
        engine.fit(module, loader("gpt, tied", 3, devices))
        return module.state_dict()

    assert largest_difference(trained("ps_fork", 2), trained("single", 1)) <= TOLERANCE


class Twice(MLP):
    """Two optimizers by hand, one of which steps on half of the module each time."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()

    def configure_optimizers(self):
        halves = list(self.net[0].parameters()), list(self.net[2].parameters())
        return [torch.optim.AdamW(halves[0], lr=1e-2, eps=1e-4), torch.optim.SGD(halves[1], lr=1.0)]


def test_optimizers_that_are_stepped_by_hand():
    def trained(strategy: str, devices: int) -> dict:
        torch.manual_seed(1)
        module = Twice().train()
        made(strategy, devices, max_epochs=1).fit(module, loader("mlp", 1, devices))
        return module.state_dict()

    expected = trained("single", 1)
    assert largest_difference(trained("ps_fork", 2), expected) <= TOLERANCE
    torch.manual_seed(1)
    assert largest_difference(Twice().state_dict(), expected) > 0.01


class Listening(Callback):
    """Writes the addresses on which this process listens."""

    def on_train_start(self, trainer, pl_module):
        mine = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        port = trainer.strategy.cluster_environment.main_port  # of the job's store, which every strategy has
        found = [c.laddr.ip for c in mine if c.laddr.port != port]
        Path(f"listening{trainer.global_rank}.json").write_text(json.dumps(found))


def test_it_listens_on_loopback_only():
    made("ps_fork", 2, max_steps=1, callbacks=[Listening()]).fit(build("mlp"), loader("mlp", 1, 2))
    for rank in range(2):
        found = json.loads(Path(f"listening{rank}.json").read_text())
        assert found
        assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Unfreezes(MLP):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": self.net[2].parameters()})


def test_parameters_that_come_later_are_refused():
    with pytest.raises(ProcessRaisedException, match="the optimizer has got other parameters while training"):
        made("ps_fork", 1, max_epochs=1).fit(Unfreezes(), loader("mlp", 1))


def test_one_process_and_a_snapshot(tmp_path):
    module = build("mlp")
    snapshot = Snapshot(tmp_path, every_n_steps=5)
    made("ps_fork:staleness=4", 1, max_steps=5, callbacks=[snapshot]).fit(module, loader("mlp", 1))
    whole = build("mlp")
    made("ps_fork", 1, max_steps=10).fit(whole, loader("mlp", 1), ckpt_path=tmp_path / "step=5")
    expected = build("mlp")
    made("single", 1, max_steps=10).fit(expected, loader("mlp", 1))
    assert largest_difference(whole.state_dict(), expected.state_dict()) <= TOLERANCE


class FailsEarly(MLP):
    def setup(self, stage):
        if self.global_rank == 1:
            raise ValueError("not even begun")


def test_a_rank_that_fails_before_training_is_named_and_ends_the_run():
    with pytest.raises(ProcessRaisedException, match="not even begun"):
        made("ps_fork:servers=1", 2, max_epochs=1).fit(FailsEarly(), loader("mlp", 1, 2))
