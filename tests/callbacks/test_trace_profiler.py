"""Traces at set steps, on a signal, and of slow steps; what is in them; errors."""

import copy
import gc
import gzip
import json
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from polyphase.callbacks import TraceProfiler
from polyphase.engine import Engine
from tests.engine.tiny import QUIET


class Steps(LightningModule):
    """Sleeps at one batch, or calls something."""

    def __init__(self, at=None, does=None, automatic=True):
        super().__init__()
        self.layer, self.at, self.does = torch.nn.Linear(4, 1), at, does
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        time.sleep(0.002)
        if batch_idx == self.at:
            self.does()
        loss = self.layer(batch).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(callback, model=None, *, num_steps=30, **flags):
    engine = Engine(**{**QUIET, "devices": 1, "max_epochs": 1, "limit_train_batches": num_steps, **flags})
    engine.fit(model or Steps(), DataLoader(torch.ones(400, 4), batch_size=2))
    return engine


def events(path):
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def named(found, name):
    return [event for event in found if event["name"] == name]


def test_the_set_steps_are_traced_with_their_parts_by_name():
    callback = TraceProfiler(wait=4, warmup=1, active=2, repeat=2, slow_factor=None)
    engine = fit(callback, callbacks=[callback])
    names = [os.path.basename(path) for path in callback.files]
    assert names == ["rank_0-step_5-set.json.gz", "rank_0-step_12-set.json.gz"]
    assert {os.path.dirname(path) for path in callback.files} == {str(Path("traces").absolute())}
    for path in callback.files:
        found = events(path)
        assert sum(event["name"].startswith("ProfilerStep#") for event in found) == 2
        for name in ("forward", "backward", "optimizer"):
            assert len(named(found, name)) == 2, name
        (outer, *_) = [event for event in found if event["name"].startswith("Optimizer.step#")]
        for inner in (named(found, name)[0] for name in ("forward", "backward", "optimizer")):
            assert inner["tid"] == outer["tid"]
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"], "nested, or Perfetto leaves it out"
    assert "training_step" not in vars(engine.strategy), "as it was"
    assert "backward" not in vars(engine.strategy)
    assert callback.summary() == ["traces: 2 of this rank in traces, for https://ui.perfetto.dev"]


def test_steps_are_those_of_the_optimizer_and_manual_ones_count():
    callback = TraceProfiler(wait=2, warmup=1, active=1, slow_factor=None)
    fit(callback, callbacks=[callback], accumulate_grad_batches=3)
    assert len(named(events(callback.files[0]), "forward")) == 3
    callback = TraceProfiler(wait=2, warmup=1, active=1, slow_factor=None)
    fit(callback, Steps(automatic=False), callbacks=[callback])
    found = events(callback.files[0])
    assert len(named(found, "forward")) == 1
    assert len(named(found, "backward")) == 1


def test_a_step_that_is_slow_causes_a_trace_of_the_next_ones():
    # Of steps of a millisecond; another one that a busy machine holds up for as long would be traced in its place.
    callback = TraceProfiler(repeat=0, active=2, slow_factor=100.0)
    fit(callback, Steps(20, lambda: time.sleep(2)), callbacks=[callback])
    (path,) = [path for path in callback.files if "step_22-" in path]
    assert "-slow_" in path
    assert len(named(events(path), "forward")) == 2


def test_a_signal_causes_a_trace_and_its_handler_is_as_it_was():
    before = signal.getsignal(signal.SIGUSR2)
    callback = TraceProfiler(repeat=0, active=1, warmup=1, slow_factor=None)
    fit(callback, Steps(5, lambda: os.kill(os.getpid(), signal.SIGUSR2)), callbacks=[callback])
    assert [os.path.basename(path) for path in callback.files] == ["rank_0-step_7-signal.json.gz"]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_trace_that_the_end_cuts_short_is_written():
    callback = TraceProfiler(wait=10, warmup=1, active=50, slow_factor=None)
    fit(callback, callbacks=[callback], num_steps=15)
    assert len(named(events(callback.files[0]), "forward")) == 4


def test_a_failure_ends_the_trace_and_leaves_the_strategy_as_it_was():
    def fail():
        raise ZeroDivisionError

    callback = TraceProfiler(wait=3, warmup=1, active=20, slow_factor=None)
    with pytest.raises(ZeroDivisionError):
        fit(callback, Steps(8, fail), callbacks=[callback])
    assert len(callback.files) == 1
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_nothing_is_written_by_a_fast_dev_run_and_without_a_cause():
    callback = TraceProfiler(wait=1, warmup=1, active=1)
    fit(callback, callbacks=[callback], fast_dev_run=5)
    never = TraceProfiler(repeat=0, slow_factor=None)
    fit(never, callbacks=[never])
    assert callback.files == never.files == []
    assert not Path("traces").exists()


def test_it_can_be_copied_and_pickled():
    callback = TraceProfiler(wait=7)
    fit(callback, callbacks=[callback], num_steps=3)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):  # noqa: S301
        assert (twin.wait, twin.slow_factor) == (7, 3.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"wait": 0}, "wait must be a whole number of at least 1, but got 0"),
        ({"warmup": 0}, "warmup must be a whole number of at least 1, but got 0"),
        ({"active": 1.5}, "active must be a whole number of at least 1, but got 1.5"),
        ({"repeat": True}, "repeat must be a whole number of at least 0, but got True"),
        ({"slow_factor": 1.0}, "slow_factor must be a number above 1, or None, but got 1.0"),
    ],
)
def test_numbers_that_are_out_of_range(arguments, match):
    with pytest.raises(ValueError, match=match):
        TraceProfiler(**arguments)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Lightning's, whose profiler is dropped
def test_two_profilers_are_refused():
    with pytest.raises(MisconfigurationException, match="which runs once in a process"):
        fit(None, callbacks=[TraceProfiler()], profiler="pytorch")
    gc.collect()


def test_what_cant_be_had_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match="keeps CUDA's allocations, but this rank computes on 'cpu'"):
        fit(None, callbacks=[TraceProfiler(memory_snapshot=True)])
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with pytest.raises(MisconfigurationException, match="can't use SIGUSR2: the program has a handler of its own"):
            fit(None, callbacks=[TraceProfiler(on_signal=True)])
        fit(None, callbacks=[TraceProfiler()], num_steps=2)
    finally:
        signal.signal(signal.SIGUSR2, before)
