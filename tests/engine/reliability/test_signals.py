"""All ranks agree on the step to stop at, whatever the order in which they get there."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from polyphase.engine.distributed.waits import current_wait
from polyphase.engine.reliability import signals
from polyphase.engine.reliability.signals import _StopConsensus

from ..tiny import Positions, Seen, engine


@pytest.fixture(autouse=True)
def _look_at_every_step(monkeypatch):
    monkeypatch.setattr(signals, "_PERIOD_S", 0.0)


@pytest.mark.parametrize("seed", range(200))
def test_all_ranks_stop_at_the_same_step(seed):
    draw = random.Random(seed)
    num_ranks, lead = draw.randint(2, 5), draw.randint(1, 6)
    store = dist.HashStore()
    ranks = [_StopConsensus(store, rank, num_ranks) for rank in range(num_ranks)]
    signalled = {rank: draw.randint(0, 20) for rank in draw.sample(range(num_ranks), draw.randint(1, num_ranks))}
    done, stopped = [0] * num_ranks, {}
    while len(stopped) < num_ranks:
        # Any rank may be next that is not ahead of the slowest by more than `lead` steps.
        running = [rank for rank in range(num_ranks) if rank not in stopped]
        rank = draw.choice([rank for rank in running if done[rank] < min(done) + lead])
        done[rank] += 1
        assert done[rank] < 200, "they never stop"
        if ranks[rank].should_stop(done[rank], requested=signalled.get(rank, 10**9) <= done[rank]):
            stopped[rank] = done[rank]
    assert len(set(stopped.values())) == 1


def test_a_lost_rank_is_not_asked():
    store, lost = dist.HashStore(), set()
    ranks = [_StopConsensus(store, rank, 3, lambda: lost) for rank in range(3)]
    for step in range(1, 4):
        assert not any(ranks[rank].should_stop(step, requested=True) for rank in range(2))
    lost.add(2)
    stopped = {
        rank: next(step for step in range(4, 9) if ranks[rank].should_stop(step, requested=True)) for rank in (0, 1)
    }
    assert stopped == {0: 5, 1: 5}


def test_rank_0_leaves_last_of_those_that_are_there():
    store, lost = dist.HashStore(), {2}
    ranks = [_StopConsensus(store, rank, 3, lambda: lost) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        last = pool.submit(ranks[0].leave)
        with pytest.raises(TimeoutError):
            last.result(timeout=0.2)
        ranks[1].leave()
        last.result(timeout=10)


def test_rank_0_is_seen_to_wait_for_the_others():
    store = dist.HashStore()
    ranks = [_StopConsensus(store, rank, 2) for rank in range(2)]
    waits = threading.Thread(target=ranks[0].leave)
    waits.start()
    deadline, pending = time.monotonic() + 10, None
    while pending is None and time.monotonic() < deadline:
        pending = current_wait(waits.ident)
    ranks[1].leave()
    waits.join()
    assert pending == "the stop of all"


def test_rank_0_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(signals, "_STOP_TIMEOUT_S", 0.1)
    store = dist.HashStore()
    _StopConsensus(store, 0, 2).leave()
    assert not store.check(["stopped/1"])


def test_nobody_stops_unasked():
    store = dist.HashStore()
    ranks = [_StopConsensus(store, rank, 2) for rank in range(2)]
    assert not any(agreement.should_stop(step, requested=False) for step in range(100) for agreement in ranks)
    assert store.num_keys() == 0


def test_a_rank_looks_once_in_a_period(monkeypatch):
    monkeypatch.setattr(signals, "_PERIOD_S", 3600.0)
    store = dist.HashStore()
    agreement = _StopConsensus(store, 0, 2)
    assert not agreement.should_stop(1, requested=False)
    store.set("requested", "1")
    for step in range(2, 50):
        assert not agreement.should_stop(step, requested=False)
    assert not store.check(["at/0"]), "it looked again before its time"


class Terminates(Callback):
    """Sends the signal to its own process in the middle of a window of accumulation."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("profiler", [None, "simple"], ids=["flat", "Lightning's loop"])
def test_one_process_stops_after_the_window(profiler):
    trainer = engine(accumulate_grad_batches=2, callbacks=Terminates(), profiler=profiler)
    module = Seen()
    with pytest.raises(SIGTERMException):
        trainer.fit(module, DataLoader(Positions(20)))
    if profiler is None:
        assert module.epochs == [[[i] for i in range(6)]]
        assert trainer.global_step == 3


def test_the_next_run_does_not_remember_the_signal():
    trainer = engine(callbacks=Terminates())
    with pytest.raises(SIGTERMException):
        trainer.fit(Seen(), DataLoader(Positions(20)))
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Terminates)]
    trainer.fit(Seen(), DataLoader(Positions(20)))
    assert not trainer.received_sigterm
