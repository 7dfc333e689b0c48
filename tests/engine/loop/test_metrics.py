"""Metrics are collected when they are read, and who reads them at every step is told what that costs."""

import logging

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from polyphase.engine.loop import metrics
from polyphase.engine.loop.metrics import _as_numbers

from ..tiny import Positions, Seen, engine


class Logs(Seen):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("index", torch.full((), float(batch_idx)), prog_bar=True)
        if batch_idx == 1:
            self.log("once", loss)
        return loss


class Reads(Callback):
    """Reads the progress bar's metrics in some batches."""

    def __init__(self, batches):
        self.batches, self.read = batches, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in self.batches:
            self.read.append(trainer.progress_bar_metrics)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="polyphase.engine")
    return lambda: [r.getMessage() for r in caplog.records if "progress_bar_metrics" in r.getMessage()]


def test_numbers_of_the_step_that_reads_them():
    reads = Reads({1, 3})
    trainer = engine(callbacks=reads)
    trainer.fit(Logs(), DataLoader(Positions(5)))
    assert all(type(value) is float for values in reads.read for value in values.values())
    assert set(trainer.callback_metrics) == {"index", "once"}, "what was logged in one batch only is kept"
    assert trainer.callback_metrics["index"] == 4


@pytest.mark.parametrize(
    ("batches", "is_told"), [(range(20), True), ((3, 4), False), (range(0, 20, 2), False)], ids=["all", "two", "half"]
)
def test_a_reader_at_every_step_is_named_once(monkeypatch, said, batches, is_told):
    monkeypatch.setattr(metrics, "_is_asynchronous", lambda value: True)  # there may be no such device here
    engine(callbacks=Reads(set(batches)), log_every_n_steps=10, max_epochs=2).fit(Logs(), DataLoader(Positions(20)))
    expected = "Reads reads `progress_bar_metrics` at every step"
    assert [message.startswith(expected) for message in said()] == [True] * is_told


def test_nobody_is_told_where_reading_costs_nothing(said):
    engine(callbacks=Reads(set(range(20)))).fit(Logs(), DataLoader(Positions(20)))
    assert said() == []


def test_values_of_one_kind_are_read_together():
    values = {"a": torch.tensor(1.5), "b": torch.tensor([2.0]), "n": torch.tensor(3), "text": "kept", "x": 4.0}
    assert _as_numbers(values) == {"a": 1.5, "b": 2.0, "n": 3, "text": "kept", "x": 4.0}
    assert type(_as_numbers(values)["n"]) is int
