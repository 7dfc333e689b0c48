"""Ranks that are forks of the process that made the module: what that process has done, and goes on with."""

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule

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
