"""Ranks that are forks of the process that made the module: what that process has done, and goes on with."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.distributed import ROOT
from tests.engine.parity import largest_difference
from tests.engine.tiny import Regression, engine, rows

FORKED = ["ddp_fork", "zero1_fork", "fsdp_fork"]


def trained(strategy: str, module: LightningModule, max_epochs: int, **fit: object) -> LightningModule:
    devices = 1 if strategy == "single" else 2
    trainer = engine(strategy=strategy, devices=devices, max_epochs=max_epochs)
    trainer.fit(module, rows(batch_size=8 // devices), **fit)
    if "ckpt_path" not in fit:
        trainer.save_checkpoint("saved.ckpt")
    return module


@pytest.mark.filterwarnings("ignore:The checkpoint saved.ckpt has no state of optimizers")  # plain SGD has none
@pytest.mark.parametrize("strategy", FORKED)
def test_a_checkpoint_that_the_first_process_saves_after_fit_goes_on(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = trained("single", Regression(), 2)
    trained(strategy, Regression(), 1)
    resumed = trained(strategy, Regression(), 2, ckpt_path="saved.ckpt")
    assert largest_difference(resumed.state_dict(), whole.state_dict()) <= 1e-6


class Counts(Callback):
    """Has a state of its own, and what is none: the metrics that it has seen."""

    def __init__(self) -> None:
        self.num_epochs, self.seen = 0, []

    def on_train_epoch_end(self, trainer, pl_module):
        self.num_epochs += 1

    def state_dict(self):
        return {"num_epochs": self.num_epochs, "far": torch.ones(2)}

    def load_state_dict(self, state_dict):
        self.num_epochs = state_dict["num_epochs"]


class Unpicklable(Counts):
    def state_dict(self):
        return {"function": lambda: None}


class Logs(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("step", float(self.trainer.global_step))
        return loss


def callbacks_after_fit(strategy: str, folder: Path) -> tuple[object, ...]:
    best, stop, own = ModelCheckpoint(monitor="step", save_top_k=2), EarlyStopping("step", patience=2), Counts()
    trainer = engine(
        strategy=strategy,
        devices=1 if strategy == "single" else 2,
        max_epochs=9,
        callbacks=[best, stop, own],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    trainer.fit(Logs(), rows(batch_size=8 if strategy == "single" else 4))
    files = sorted(Path(path).relative_to(folder) for path in best.best_k_models)
    return stop.stopped_epoch, stop.wait_count, own.num_epochs, float(best.best_model_score), files


@pytest.mark.parametrize("strategy", FORKED)
def test_callbacks_have_the_state_that_they_have_in_one_process(strategy, tmp_path):
    assert callbacks_after_fit(strategy, tmp_path / "two") == callbacks_after_fit("single", tmp_path / "one")


def test_a_state_that_can_not_leave_a_worker_is_named_after_the_run():
    trainer = engine(strategy="ddp_fork", devices=2, max_epochs=1, callbacks=[Unpicklable()])
    # A warning, which is an error in these tests.
    with pytest.raises(ProcessRaisedException, match="UserWarning: The state of Unpicklable stays in the worker"):
        trainer.fit(Regression(), rows(batch_size=4))


class Grows(Regression):
    """Its memory has a row more after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 4))

    def training_step(self, batch, batch_idx):
        self.memory = torch.cat([self.memory, torch.full((1, 4), float(batch_idx))])
        return super().training_step(batch, batch_idx)


# One process has seen all samples in as many calls.
@pytest.mark.filterwarnings("ignore:the first 2 step.s. of (FSDP)?Grows .* are not those of one process. 'memory'")
@pytest.mark.parametrize("strategy", FORKED)
def test_a_buffer_that_has_grown_comes_back(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = trained(strategy, Grows(), 1)
    assert torch.equal(found.memory, torch.arange(2.0)[:, None].expand(2, 4))


class Extends(Grows):
    """Its table is made as long as the first batch needs it."""

    def training_step(self, batch, batch_idx):
        if not len(self.memory):
            self.memory = torch.ones(3, 4)
        return Regression.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("strategy", FORKED)
def test_the_first_steps_are_compared_with_a_buffer_that_grows(strategy):
    found = Extends()
    engine(strategy=strategy, devices=2, check_first_steps=True).fit(found, rows(batch_size=4))  # or it is an error
    assert found.memory.shape == (3, 4)


SCRIPT = """
import torch
from tests.engine.tiny import Regression, engine, rows
torch.set_num_threads(2)
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()
engine(strategy="{strategy}", devices=2).fit(Regression(), rows())
print("trained")
"""


@pytest.mark.timeout(120)
def test_threads_of_torch_in_the_first_process_hang_no_rank():
    """libgomp's threads are not in a fork, whose first parallel region would wait for them for ever."""
    command = [sys.executable, "-c", SCRIPT.format(strategy="ddp_fork")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "trained" in finished.stdout, finished.stdout + finished.stderr


def test_parameters_are_offloaded_on_cpus():
    module, expected = Regression(), Regression()
    engine(strategy="fsdp_fork", devices=2, offload="parameters").fit(module, rows(batch_size=4))
    engine().fit(expected, rows(batch_size=8))
    assert largest_difference(module.state_dict(), expected.state_dict()) <= 1e-6
