"""`on_rank_loss="continue"`: ranks are killed at named points, and the result is that of a resumption without them."""

import csv
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.distributed import environment

from ...chaos.without_restart import SaveForSurvivors
from ..parity import TOLERANCE, adamw, largest_difference
from ..tiny import QUIET

# The norm layer's statistics are those of the rank's own samples, as in any run of ddp.
pytestmark = pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")

RANKS, SIZE, BATCH, AT, EPOCHS = 3, 61, 12, 7, 3
"""Step 7 is in the middle of the second epoch; the last step of an epoch has one sample only."""


class Net(LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Linear(16, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        # A filler has one sample, of which a norm layer in training has no variance.
        inputs = torch.cat([inputs, inputs.flip(0)]) if len(inputs) == 1 else inputs
        loss = (self.net(inputs)[: len(targets)].squeeze(1) - targets).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7), "interval": "step"},
        }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_in_backward(output: Tensor) -> None:
    output.register_hook(lambda _: die())


class Victim(Callback):
    """Kills a rank at a named point of the step after step `AT`."""

    def __init__(self, rank: int, point: str) -> None:
        self.rank, self.point = rank, point

    def _is_due(self, trainer: Any) -> bool:
        return trainer.world_size == RANKS and trainer.global_rank == self.rank and trainer.global_step == AT

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.point == "fetch" and self._is_due(trainer):
            die()
        if self.point == "backward" and self._is_due(trainer):
            # The last layers have their gradients, the first one has not.
            pl_module.net[0].register_forward_hook(lambda module, inputs, output: _dies_in_backward(output))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self.point == "forward" and self._is_due(trainer):
            die()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.point == "optimizer" and self._is_due(trainer):
            die()


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1).sin())


def fit(module: LightningModule, devices: int = RANKS, workers: int = 0, resume: Path | None = None, **flags: Any):
    arguments = {"global_batch_size": BATCH, "max_epochs": EPOCHS, "hang_timeout_s": 30, **flags}
    engine = Engine(**{"strategy": "ddp_fork", "devices": devices, **QUIET, **arguments})
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(data(), batch_size=2, shuffle=True, generator=order, num_workers=workers)
    engine.fit(module, loader, ckpt_path=resume, weights_only=None if resume is None else False)
    return engine


def weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def resumed_without(victim: int, path: Path, module: LightningModule, at: int = AT, **flags: Any) -> LightningModule:
    left = [rank for rank in range(RANKS) if rank != victim]
    fit(type(module)(0.3), callbacks=[SaveForSurvivors(path, left, at)], max_steps=at, **flags)
    fit(module, devices=len(left), resume=path, **flags)
    return module


PLACES = [
    (0, "backward", AT, 0),
    (1, "forward", AT, 0),
    (2, "backward", AT, 2),
    (2, "optimizer", AT + 1, 0),
    (0, "optimizer", AT + 1, 2),
]


@pytest.mark.parametrize(("victim", "point", "made", "workers"), PLACES)
def test_weights_are_those_of_a_resumption_without_the_killed_rank(tmp_path, victim, point, made, workers):
    killed = Net(0.3)
    engine = fit(killed, workers=workers, on_rank_loss="continue", callbacks=[Victim(victim, point)])
    expected = resumed_without(victim, tmp_path / "saved.ckpt", Net(0.3), made, workers=workers)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)
    # Two ranks are left, whose sum has one order: the weights are equal bit by bit.
    assert largest_difference(weights(killed), weights(expected)) == 0
    if victim != 0:  # whose running means are the ones that are saved
        assert largest_difference(killed.state_dict(), expected.state_dict()) == 0


class Behind(Callback):
    """Rank 2 is killed when rank 0 has made a step, and rank 1, which is about to, has lost its connections."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.world_size != RANKS or trainer.global_step != AT:
            return
        if trainer.global_rank == 2:
            (self.folder / "pid").write_text(str(os.getpid()))
        if trainer.global_rank == 1:
            while not ((self.folder / "made").exists() and (self.folder / "pid").exists()):
                time.sleep(0.01)
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")  # as gloo says to a rank that has not got all

    def on_train_step_end(self, trainer: Any, pl_module: Any, save_now: bool) -> None:
        if trainer.global_rank == 0 and trainer.global_step == AT + 1:
            (self.folder / "made").touch()


def test_a_rank_that_has_not_made_the_step_gets_it_from_one_that_has(tmp_path):
    killed = Net(0.3)
    engine = fit(killed, on_rank_loss="continue", callbacks=[Behind(tmp_path)])
    expected = resumed_without(2, tmp_path / "saved.ckpt", Net(0.3), AT + 1)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)
    assert largest_difference(killed.state_dict(), expected.state_dict()) == 0


class Rank0sDuties(Callback):
    """Writes down the losses that a rank learns of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_rank_loss(self, trainer: Any, pl_module: Any, lost: Any) -> None:
        (self.folder / f"{trainer.global_rank} of {trainer.world_size}").write_text(str(lost))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert [event.ranks for event in trainer.rank_losses] == [[0]]


def test_the_duties_of_rank_0_pass_to_another(tmp_path, capfd):
    callbacks = [
        Victim(0, "backward"),
        Rank0sDuties(tmp_path),
        Snapshot(tmp_path / "snapshots", every_n_steps=4, in_background=False),
    ]
    flags = {"logger": CSVLogger(tmp_path, version="log", flush_logs_every_n_steps=1), "log_every_n_steps": 1}
    fit(Logged(), on_rank_loss="continue", callbacks=callbacks, enable_run_summary=True, **flags)
    said = [(tmp_path / f"{rank} of 2").read_text() for rank in range(2)]
    assert all(re.match(rf"rank 0 lost after step {AT}, 2 left: went on after \d+\.\d\d s", text) for text in said)
    assert f"rank 0 lost after step {AT}" in capfd.readouterr().out  # in the summary of the run
    rows = csv.DictReader((tmp_path / "lightning_logs" / "log" / "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in rows if row["last"]] == list(range(EPOCHS * -(-SIZE // BATCH)))
    resumed = Net()
    fit(resumed, devices=1, resume=tmp_path / "snapshots" / "last", max_epochs=EPOCHS + 1)


class Logged(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.trainer.fit_loop._should_accumulate():
            self.log("last", loss)
        return loss


class Several(Callback):
    """Kills a rank after the other, one every two steps, until one is left."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        is_due = trainer.global_step == 2 * (len(trainer.rank_losses) + 1) and trainer.world_size > 1
        if is_due and trainer.global_rank == trainer.global_step // 2 % trainer.world_size:
            die()


def test_one_rank_can_be_left():
    module = Net()
    engine = fit(module, on_rank_loss="continue", callbacks=[Several()])
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)


def test_a_fourth_loss_within_ten_minutes_ends_the_run():
    with pytest.raises(ProcessRaisedException, match=r"ranks? .* lost, the 4th loss within 10 minutes"):
        fit(Net(), devices=5, on_rank_loss="continue", callbacks=[Several()])


class Validated(Net):
    """Keeps the outputs of a validation, as many modules do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.outputs: list[Tensor] = []

    def val_dataloader(self) -> DataLoader:
        return DataLoader(data(), batch_size=4)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.outputs.append(self.net(batch[0]))
        self.log("val_loss", self.outputs[-1].mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        assert len(self.outputs) <= self.trainer.num_val_batches[0]
        self.outputs.clear()


class Outside(Callback):
    """Kills a rank outside of a step of the second epoch, and counts the ends of validations."""

    def __init__(self, rank: int, point: str) -> None:
        self.rank, self.point, self.num_ends, self.values = rank, point, 0, list[float]()

    def _reach(self, trainer: Any, point: str) -> None:
        is_due = trainer.current_epoch == 1 and trainer.world_size == RANKS and not trainer.sanity_checking
        if is_due and point == self.point and trainer.global_rank == self.rank:
            die()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 2:
            self._reach(trainer, "validation")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._reach(trainer, "end of a validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.num_ends += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._reach(trainer, "epoch end")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._reach(trainer, "epoch start")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._reach(trainer, "save")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert [event.ranks for event in trainer.rank_losses] == [[self.rank]]
        assert self.num_ends == EPOCHS


OUTSIDE = [
    (1, "validation"),
    (0, "end of a validation"),
    (2, "epoch end"),
    (0, "epoch start"),
    (0, "save"),
    (1, "save"),
]


@pytest.mark.parametrize(("victim", "point"), OUTSIDE)
def test_after_a_loss_outside_of_a_step_what_was_begun_is_done_once(tmp_path, victim, point):
    module = Validated()
    logger = CSVLogger(tmp_path, version="log", flush_logs_every_n_steps=1)
    callbacks = [Outside(victim, point), ModelCheckpoint(tmp_path / "saved", save_top_k=-1)]
    flags = {"logger": logger, "enable_checkpointing": True, "on_rank_loss": "continue"}
    engine = fit(module, callbacks=callbacks, **flags)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)
    assert len(list((tmp_path / "saved").iterdir())) == EPOCHS
    rows = csv.DictReader((tmp_path / "lightning_logs" / "log" / "metrics.csv").read_text().splitlines())
    assert [int(row["epoch"]) for row in rows if row["val_loss"]] == list(range(EPOCHS))
    alone = Engine(**QUIET, devices=1).validate(module, verbose=False)[0]["val_loss"]
    assert float(engine.callback_metrics["val_loss"]) == pytest.approx(alone, abs=TOLERANCE)


class Early(Outside):
    """Kills a rank in a validation in the middle of the second epoch."""

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.global_step == AT + 1:
            self._reach(trainer, "validation")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pass


@pytest.mark.parametrize("accident", [Victim(2, "optimizer"), Early(2, "validation")])
def test_a_snapshot_right_after_a_loss_resumes_at_its_place(tmp_path, accident):
    flags = {"limit_val_batches": 2, "val_check_interval": 1}
    snapshots = Snapshot(tmp_path, every_n_steps=1, keep_last=100, in_background=False)
    killed, resumed = Validated(0.3), Validated(0.3)
    fit(killed, on_rank_loss="continue", callbacks=[accident, snapshots], **flags)
    (path,) = tmp_path.glob(f"step={AT + 1}")
    fit(resumed, devices=2, resume=path, **flags)
    assert largest_difference(weights(killed), weights(resumed)) == 0


class OwnCollective(Callback):
    """A hook that has the ranks wait for each other, and one of them killed meanwhile."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            die()
        dist.barrier()


def test_a_loss_in_a_users_own_collective_ends_the_run_by_name(capfd):
    started_s = time.monotonic()
    with pytest.raises((ProcessRaisedException, ProcessExitedException)):
        fit(Net(), on_rank_loss="continue", callbacks=[OwnCollective()])
    shown = capfd.readouterr().err
    assert "on_rank_loss='continue': rank 1 lost while this rank was in a collective of a hook" in shown
    assert time.monotonic() - started_s < 30


def test_validations_after_a_loss_evaluate_each_sample_once(tmp_path):
    module = Validated()
    engine = fit(module, on_rank_loss="continue", callbacks=[Victim(1, "backward")])
    alone = Engine(**QUIET, devices=1).validate(module, verbose=False)[0]["val_loss"]
    assert float(engine.callback_metrics["val_loss"]) == pytest.approx(alone, abs=TOLERANCE)


class Failing(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == AT and trainer.global_rank == 1:
            raise ValueError("a mistake of the user's")


def test_an_exception_is_no_loss():
    with pytest.raises(ProcessRaisedException, match="a mistake of the user's"):
        fit(Net(), on_rank_loss="continue", callbacks=[Failing()])


class Stopped(Victim):
    """Another rank is stopped, as by a debugger, when one is killed."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._is_due(trainer) and self.rank == trainer.global_rank:
            die()
        if trainer.world_size == RANKS and trainer.global_step == AT and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_hangs_meanwhile_is_left_behind():
    engine = fit(Net(), on_rank_loss="continue", callbacks=[Stopped(2, "forward")], hang_timeout_s=6)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)


class Hangs(Victim):
    """A rank that no longer does anything: it sleeps, or is stopped."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._is_due(trainer):
            time.sleep(1000) if self.point == "sleeps" else os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(("victim", "point"), [(1, "sleeps"), (0, "stopped")])
def test_a_rank_that_hangs_is_lost_to_the_others(tmp_path, capfd, victim, point):
    killed = Net(0.3)
    engine = fit(killed, on_rank_loss="continue", callbacks=[Hangs(victim, point)], hang_timeout_s=5)
    expected = resumed_without(victim, tmp_path / "saved.ckpt", Net(0.3))
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)
    assert largest_difference(weights(killed), weights(expected)) == 0
    shown = capfd.readouterr().err
    assert re.search(rf"rank {victim}: no progress for \d+ s, and the others go on without", shown)
    assert ("time.sleep(1000)" in shown) == (point == "sleeps"), "its stack"


class Untidy(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            super().backward(loss, *args, **kwargs)
        except RuntimeError:  # another rank is lost
            time.sleep(2)
            raise


class OneLoss(Hangs):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert [event.ranks for event in trainer.rank_losses] == [[self.rank]]


@pytest.mark.parametrize(("victim", "point"), [(1, "sleeps"), (0, "stopped")])
def test_who_waited_for_a_rank_that_hangs_may_take_seconds_to_notice_its_loss(victim, point):
    engine = fit(Untidy(), on_rank_loss="continue", callbacks=[OneLoss(victim, point)], hang_timeout_s=5)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)


class OwnGroup(Callback):
    """Rank 0 waits for rank 1 in a group that a hook has made, while rank 1 goes on without rank 2."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.group = dist.new_group([0, 1])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.world_size == RANKS and trainer.global_step == AT and trainer.global_rank == 2:
            time.sleep(0.5)
            die()
        if trainer.world_size == RANKS and trainer.global_step == AT and trainer.global_rank == 0:
            dist.barrier(self.group)


def test_a_rank_that_waits_for_one_that_recovers_is_left_behind():
    engine = fit(Net(), on_rank_loss="continue", callbacks=[OwnGroup()], hang_timeout_s=4)
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)


class Apart(Net):
    """Counts the samples of each rank in each step, in files."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not self.trainer.is_filler(batch_idx):
            (self.folder / f"{self.global_step}-{os.getpid()}-{batch_idx}").write_text(str(len(batch[0])))
        return super().training_step(batch, batch_idx)

    def on_rank_loss(self, lost: Any) -> None:
        words = self.trainer.strategy.loss_in_words(lost.step)
        (self.folder / f"lost by {self.global_rank}").write_text(f"{lost}{words}")


@pytest.mark.parametrize(
    "flag",
    [
        "local_sgd_fork:sync_every=3,warmup=9",
        "local_sgd_fork:sync_every=3,overlap_steps=2,warmup=9",
        "diloco_fork:sync_every=5",
    ],
)
def test_ranks_that_train_apart_meet_without_the_lost_one(tmp_path, monkeypatch, flag):
    monkeypatch.setattr(Apart, "folder", tmp_path, raising=False)
    module = Apart()
    engine = fit(module, strategy=flag, on_rank_loss="continue", callbacks=[Victim(1, "optimizer")])
    assert engine.global_step == EPOCHS * -(-SIZE // BATCH)
    said = [(tmp_path / f"lost by {rank}").read_text() for rank in range(2)]
    assert all(re.match(r"rank 1 lost after step \d+, 2 left: went on", text) for text in said)
    has_moments = "diloco" in flag  # the loss is in the warm-up of the other
    assert all(("Lost with it are its optimizer's moments" in text) == has_moments for text in said)
    for step in range(10, engine.global_step):  # after the loss, which is at step 7, and the ranks' way to one step
        size = sum(int(path.read_text()) for path in tmp_path.glob(f"{step}-*"))
        assert size == (1 if step % 6 == 5 else BATCH), step


REFUSED = [
    ({"strategy": "local_sgd_fork:sync_every=2", "compression": "topk:0.1"}, "compression='topk:0.1'"),
    ({"strategy": "ps_fork"}, "goes on without a worker by itself"),
    ({"strategy": "ddp"}, "in the process of rank 0"),
    ({"strategy": "ddp", "num_nodes": 2}, "num_nodes=2, where only `polyphase launch` of node 0 has a store"),
    ({"strategy": "ddp_fork:static_graph=true"}, "has static_graph=true"),
    ({"strategy": DDPStrategy()}, "'DDPStrategy' is not the engine's own"),
    ({"devices": 1}, "one process has no other"),
    ({"global_batch_size": None}, "global_batch_size"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED)
def test_what_can_not_go_on_is_refused_by_name_with_the_remedy(flags, reason):
    arguments = {"strategy": "ddp_fork", "devices": 2, "global_batch_size": 8, "on_rank_loss": "continue", **flags}
    with pytest.raises(ValueError, match=f"(?s){re.escape(reason)}.*resume='auto'"):
        Engine(**{**QUIET, **arguments})


@pytest.mark.parametrize(
    ("strategy", "secret", "reason"),
    [
        ("fsdp", "a secret", "strategy 'fsdp' was not tried on several nodes"),
        ("diloco:sync_every=2", "a secret", "was not tried on several nodes"),
        ("ddp", "", "Give all nodes one secret word, in the variable POLYPHASE_JOB_SECRET"),
    ],
)
def test_what_several_nodes_can_not_go_on_with_is_refused(monkeypatch, tmp_path, strategy, secret, reason):
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    own = {"POLYPHASE_SURVIVORS": str(tmp_path), "POLYPHASE_JOB_SECRET": secret}
    for name, value in (sizes | ranks | place | own).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_kept_secrets", [])  # of other tests in this process
    with pytest.raises(ValueError, match=f"(?s){re.escape(reason)}.*resume='auto'"):
        Engine(strategy=strategy, num_nodes=2, global_batch_size=8, on_rank_loss="continue", **QUIET)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_a_logger_that_no_other_rank_can_go_on_with_is_refused():
    with pytest.raises(ValueError, match=r"the log of DummyLogger without rank 0.*resume='auto'"):
        fit(Net(), on_rank_loss="continue", logger=DummyLogger())


def test_steps_by_hand_are_refused_before_a_process_starts():
    with pytest.raises(ValueError, match=r"steps by hand take .*resume='auto'"):
        fit(Manual(), on_rank_loss="continue")
