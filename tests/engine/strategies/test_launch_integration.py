"""The launchers of workers: the port that they meet at."""

import os
import socket

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from polyphase.engine import Engine
from tests.engine.tiny import QUIET, Regression, rows

pytestmark = pytest.mark.timeout(60)


class Validated(Regression):
    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


class WritesPort(Callback):
    """Rank 0's port, on a line of its own in a file, for every run."""

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero:
            with open("ports", "a") as file:
                print(os.environ["MASTER_PORT"], file=file)


def ports() -> list[int]:
    with open("ports") as file:
        return [int(line) for line in file]


def engine(strategy: str) -> Engine:
    return Engine(strategy=strategy, devices=2, max_steps=1, limit_val_batches=0, callbacks=[WritesPort()], **QUIET)


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_every_run_has_a_port_of_its_own(strategy, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    engine(strategy).fit(Regression(), rows())
    with socket.create_server(("", ports()[0])):  # as another program's may, once the run is over
        engine(strategy).fit(Regression(), rows())
    first, second = ports()
    assert first != second
    assert "MASTER_PORT" not in os.environ


def test_the_runs_of_one_engine_have_too(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    one = engine("ddp_fork")
    one.validate(Validated(), rows(), verbose=False)
    with socket.create_server(("", ports()[0])):
        one.fit(Regression(), rows())


def test_a_port_that_is_named_is_taken(monkeypatch):
    named = LightningEnvironment().main_port
    monkeypatch.setenv("MASTER_PORT", str(named))
    engine("ddp_fork").fit(Regression(), rows())
    assert ports() == [named]
    assert os.environ["MASTER_PORT"] == str(named)
