"""What a process says of where it is, and whom the watchdog makes out as the culprit."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, Dataset

from polyphase.engine import Engine
from polyphase.engine.distributed.job_store import JobStore, _StoreLine
from polyphase.engine.reliability import failure
from polyphase.engine.reliability.failure import Wakeup
from polyphase.engine.reliability.heartbeat import describe, stack_of
from polyphase.engine.reliability.rendezvous import (
    ALL_CONNECTED,
    LEFT,
    RankRegistry,
    _process_key,
    current_job,
    this_process,
    wait_for_all,
)
from polyphase.engine.reliability.watchdog import Verdict, Watchdog, behind
from tests.distributed import in_a_fork, run_ranks
from tests.engine.tiny import QUIET, Regression, rows


class Rows(Dataset):
    """Notes in which phase each row is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.heartbeat = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.heartbeat is not None:
            self.seen.append(("row", self.heartbeat.phase))
        return torch.ones(2)


class Notes(LightningModule):
    def __init__(self, rows: Rows, manual: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.rows = rows
        self.automatic_optimization = not manual
        self.places: list[dict] = []

    def note(self, hook: str) -> None:
        self.rows.seen.append((hook, self.trainer.heartbeat.phase))
        self.places.append(self.trainer.heartbeat.place())

    def setup(self, stage: str) -> None:
        self.rows.heartbeat = self.trainer.heartbeat
        self.note("setup")

    def training_step(self, batch: torch.Tensor, batch_idx: int):
        self.note("training_step")
        loss = self.layer(batch).sum()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.note("on_validation_epoch_end")

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("test_step")

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        self.note("on_save_checkpoint")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def engine(**flags) -> Engine:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Engine(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **flags})


def loader(rows: Rows) -> DataLoader:
    return DataLoader(rows, batch_size=2)


def test_the_loops_say_in_which_phase_they_are():
    rows = Rows()
    module = Notes(rows)
    trainer = engine()
    trainer.fit(module, loader(rows), loader(rows))
    of_hook = dict(rows.seen)
    assert of_hook.pop("row") in ("fetch", "validate")
    assert of_hook == {
        "setup": "setup",
        "training_step": "train",
        "validation_step": "validate",
        "on_validation_epoch_end": "validate",
        "on_train_epoch_end": "train",
        "on_save_checkpoint": "save",
    }
    trained = rows.seen[: rows.seen.index(("training_step", "train"))]
    assert trained[-1] == ("row", "fetch")  # a slow loader is told from slow compute
    rows.seen.clear()
    trainer.test(module, loader(rows), verbose=False)
    assert ("test_step", "test") in rows.seen


@pytest.mark.parametrize("manual", [False, True])
def test_each_batch_is_another_place_in_lightnings_own_loop_too(manual):
    rows = Rows()
    module = Notes(rows, manual)
    engine().fit(module, loader(rows), loader(rows))
    in_batches = [place for place, (hook, _) in zip(module.places, hooks(rows), strict=True) if hook.endswith("_step")]
    assert len(in_batches) == 4
    assert all(place not in in_batches[:number] for number, place in enumerate(in_batches))


def hooks(rows: Rows) -> list[tuple[str, str]]:
    return [each for each in rows.seen if each[0] != "row"]


def test_a_run_leaves_no_thread():
    rows = Rows()
    engine().fit(Notes(rows), loader(rows))
    assert not [thread for thread in threading.enumerate() if thread.name == "polyphase-watchdog"]


class Traced(Callback):
    """Looks at the report under a debugger, and without one."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.before = trainer.heartbeat.report()
        outer = sys.gettrace()

        def look() -> None:
            self.during = trainer.heartbeat.report()

        def trace(*_):
            return trace

        sys.settrace(trace)
        try:
            look()
        finally:
            sys.settrace(outer)


def test_a_debugger_is_noticed_and_the_users_line_named():
    rows, traced = Rows(), Traced()
    engine(callbacks=traced).fit(Notes(rows), loader(rows))
    assert traced.during["is_debugged"]
    if sys.gettrace() is None:
        assert not traced.before["is_debugged"]
    assert "test_watchdog.py" in traced.before["line"]
    assert "in on_train_start" in traced.before["line"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_amid_a_look_at_a_stack(is_enabled):
    """In CPython 3.11 that ended processes in SIGSEGV; later ones collect none while they make a frame's object."""
    amid: list[str] = []

    def note(phase, info) -> None:
        amid.extend(frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe()))

    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        (gc.enable if is_enabled else gc.disable)()
        stack = stack_of(threading.get_ident())
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert "test_no_garbage_is_collected_amid_a_look_at_a_stack" in [call.name for call in stack]
    if sys.version_info < (3, 12):
        assert "_calls" not in amid


@pytest.mark.parametrize("value", [0, -1, "soon", float("nan")])
def test_the_timeout_is_a_number_of_seconds(value):
    with pytest.raises(ValueError, match=r"hang_timeout_s( must be greater than 0|='soon': a number or None)"):
        engine(hang_timeout_s=value)


def report(batch: int, pending: str | None = None, **changed) -> dict:
    where = {"step": batch, "batch": batch, "evaluated": 0, "phase": "train", "pending": pending, "line": None}
    return {**where, "units": None, "is_debugged": False, "resume_from": None, **changed}


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ([report(3), report(2), report(3)], [1]),  # the one behind
        ([report(3, "all_reduce"), report(3), report(3, "barrier")], [1]),  # the one that waits for nobody
        ([report(3, evaluated=2), report(3, evaluated=1)], [1]),
        ([report(3, "barrier"), report(3, "barrier")], [0, 1]),  # nobody knows
        ([report(4), report(3, "barrier"), report(3)], [2]),
    ],
)
def test_the_culprit_is_behind_or_waits_for_nobody(ranks, culprits):
    assert behind(dict(enumerate(ranks))) == culprits


def called(*numbers: int, **others: int) -> dict:
    """The last collectives of the group of all, and of other groups, as torch's recorder has them."""

    def calls(*numbers: int) -> list[dict]:
        return [{"number": number, "is_p2p": False} for number in numbers]

    groups = {"gloo 0": calls(*numbers), **{f"gloo {name}": calls(number) for name, number in others.items()}}
    return report(3, "barrier", collectives={"calls": groups, "groups": {"0": [0, 1, 2]}})


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ([called(4, 5), called(4), called(4, 5)], [1]),
        ([called(4, 5), called(4, 5), called(4, 5)], [0, 1, 2]),
        ([called(4, 5), called(4), {**called(4, 5), "collectives": None}], [1]),
        ([called(5, a=1), called(5, a=2), called(5)], [0]),  # of a group that rank 2 is not in
    ],
)
def test_of_ranks_that_all_wait_the_culprit_has_not_called_what_the_others_wait_in(ranks, culprits):
    assert behind(dict(enumerate(ranks))) == culprits


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (report(3, phase="fetch"), "is in phase 'fetch' of step 3, batch 3: waits for its data loader"),
        (report(3, "barrier"), "is in phase 'train' of step 3, batch 3: waits for other ranks in barrier"),
        (report(3, line="a.py:3 in f"), "is in phase 'train' of step 3, batch 3: computes, at a.py:3 in f"),
        (None, "has sent no report"),
    ],
)
def test_a_place_in_words(known, text):
    assert describe(known) == text


def _two_machines(rank: int) -> None:
    job = current_job()
    peers = RankRegistry("test", job)
    peers.me = {**peers.me, "host": f"host {rank}"}
    job.write(_process_key(rank), peers.me)
    torch.distributed.barrier()
    peers.beat(report(1))
    assert not peers.is_local(1 - rank)
    torch.distributed.barrier()
    assert peers.silent(0.0, 10.0) == {}
    torch.distributed.barrier()
    if rank == 0:
        peers.beat(report(1))  # rank 0 goes on, rank 1 falls silent
    torch.distributed.barrier()
    assert peers.silent(9.0, 10.0) == {}
    assert peers.silent(11.0, 10.0) == ({1: 11.0} if rank == 0 else {})
    torch.distributed.barrier()
    peers.beat({**report(1), "phase": LEFT})
    torch.distributed.barrier()
    assert peers.silent(99.0, 10.0) == {}  # whose run is over may be silent
    assert peers.ended_ranks() == []


def test_silence_is_measured_by_the_listeners_own_clock():
    run_ranks(_two_machines, 2)


def _keys_read(num_ranks: int, monkeypatch) -> dict[str, float]:
    """Keys that a rank asks the store for in a beat and a look at the others, of ranks on machines of four."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [JobStore(server, rank, num_ranks) for rank in range(num_ranks)]
    for rank, job in enumerate(jobs):
        job.write(_process_key(rank), {**this_process(), "host": f"host {rank // 4}"})
    wait_for_all(jobs[0], timedelta(seconds=10))
    ask, keys = _StoreLine.ask, []

    def count(line, method, *arguments):
        keys.append(len(arguments[0]) if isinstance(arguments[0], list) else 1)
        return ask(line, method, *arguments)

    found = {}
    peers = [RankRegistry("test", job) for job in (jobs[0], jobs[num_ranks // 2])]
    for each in peers:
        each.me = {**each.me, "host": f"host {each.rank // 4}"}
    monkeypatch.setattr(_StoreLine, "ask", count)
    for each in peers:
        each.beat(report(1))
        each.beat(report(1))
    keys.clear()
    for what, look in (
        ("beat", lambda each: each.beat(report(1))),
        ("silence, before others have beaten", lambda each: each.silent(0.0, 10.0)),
        ("ended", lambda each: each.ended_ranks()),
    ):
        for each in peers:
            look(each)
        found[what] = sum(keys) / len(peers)
        keys.clear()
    monkeypatch.setattr(_StoreLine, "ask", ask)
    for rank, job in enumerate(jobs):
        job.write(f"polyphase/watch/test/beat/{rank}", {**report(1), **this_process(), "number": 1})
    monkeypatch.setattr(_StoreLine, "ask", count)
    for each in peers:
        each.silent(1.0, 10.0)
    return {**found, "silence": sum(keys) / len(peers)}


def test_what_a_rank_reads_in_the_store_does_not_grow_with_their_number(monkeypatch):
    assert _keys_read(32, monkeypatch) == _keys_read(64, monkeypatch)


def test_any_rank_of_another_machine_that_falls_silent_is_noticed(monkeypatch):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [JobStore(server, rank, 32) for rank in range(32)]
    peers = RankRegistry("test", jobs[0])
    for rank, job in enumerate(jobs):
        job.write(_process_key(rank), {**this_process(), "host": f"host {rank // 4}"})
    jobs[0].write(ALL_CONNECTED, {})
    peers.me = {**peers.me, "host": "host 0"}
    peers.beat(report(1))
    assert not peers.absent
    noticed = []
    for second in range(40):
        for rank in set(range(32)) - {12}:  # which has connected, and ended before its first beat
            number = 1 if rank in (4, 20) else second + 1
            jobs[rank].write(f"polyphase/watch/test/beat/{rank}", {**report(1), **this_process(), "number": number})
        peers.beat(report(1))
        noticed += peers.silent(float(second), 10.0)
    assert set(noticed) == {4, 12, 20}


class Stands(threading.Thread):
    """Waits in the standard library, called by code of the user's."""

    def __init__(self, heartbeat) -> None:
        super().__init__(daemon=True)
        self.heartbeat, self.queue, self.is_there = heartbeat, Queue(), threading.Event()

    def run(self) -> None:
        self.heartbeat.begin()
        self.is_there.set()
        self.queue.get()


@pytest.fixture
def standing():
    thread = Stands(engine().heartbeat)
    thread.start()
    thread.is_there.wait()
    while not stack_of(thread.ident)[0].file.endswith("threading.py"):
        time.sleep(0.01)
    yield thread.heartbeat
    thread.queue.put(None)
    thread.join()


def test_the_users_line_is_none_of_the_standard_library(standing):
    assert standing.report()["line"].endswith(f"test_watchdog.py:{Stands.run.__code__.co_firstlineno + 3} in run")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_verdict_fits_on_a_screen(standing, is_known, capsys):
    """Whatever the number of ranks, and however deep their stacks are; it is of one look at each thread."""
    looks = []

    def positions(**of_this):
        looks.append(of_this)
        own = standing.report(**of_this)
        deep = own["stack"] + '  File "/home/me/model.py", line 7, in descend\n    self.descend()\n' * 60
        others = {
            rank: {**own, "stack": deep.replace("7", str(rank)), "batch": rank if is_known else 0, "pending": "barrier"}
            for rank in range(1, 64)
        }
        return {0: own, **others}

    Verdict(standing, "failures", positions).pass_alone(
        "hang", "no progress for 8 s", [1] if is_known else [*range(64)]
    )
    lines = capsys.readouterr().err.splitlines()
    assert looks == [{"with_stack": True}]
    assert 10 < len(lines) <= 35, lines
    assert lines[0].startswith(f"[rank 0] hang, because of rank {int(is_known)}: no progress for 8 s; rank")
    assert ("rank 0: is in phase 'setup'" in "\n".join(lines)) == is_known
    assert ("so may ranks 2-63" in lines[0]) != is_known
    assert not [line for line in lines if "threading.py" in line or "queue.py" in line]
    (written,) = Path("failures").iterdir()
    assert "threading.py" in written.read_text()


class Ended(BaseException):
    """In place of the end of the process."""


def _exit() -> None:
    raise Ended


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_that_stands_still_on_an_accelerator_may_wait_for_others(device, monkeypatch, capsys):
    """Its thread may be in `.item()`, of which Python's stack says nothing."""
    monkeypatch.setattr("polyphase.engine.reliability.watchdog.hard_exit", _exit)
    strategy = SimpleNamespace(root_device=torch.device(device))
    watchdog = Watchdog(engine().heartbeat, 60.0, "failures", 2, strategy)
    looked: list[Any] = []
    monkeypatch.setattr(watchdog, "_check_other_hosts", lambda peers: looked.append(peers) or True)
    peers = SimpleNamespace(ended_ranks=lambda: [])
    place = {**report(1), "is_debugged": False}
    watchdog._check_processes(peers, place)
    assert looked == ([] if device == "cpu" else [peers])
    watchdog._clock = 10.0
    watchdog._without_store(
        place, 4.0, 6.0
    )  # for 4 s it has stood still, and the store has been gone: perhaps at its end
    watchdog._clock = 106.0
    ends = pytest.raises(Ended) if device != "cpu" else nullcontext()
    with ends:
        watchdog._without_store(place, 100.0, 6.0)
    assert ("key-value store is gone" in capsys.readouterr().err) == (device != "cpu")
    watchdog._without_store(place, 1.0, 6.0)  # one that gets on is left alone


class Pruned(Callback):
    """As a sweep's callback ends a trial."""

    def on_train_start(self, trainer, pl_module) -> None:
        raise ValueError("not worth going on")


def test_what_a_process_alone_raises_leaves_no_report():
    rows = Rows()
    with pytest.raises(ValueError, match="not worth going on"):
        engine(callbacks=Pruned()).fit(Notes(rows), loader(rows))
    assert not Path("failures").exists()


def test_no_exception_ends_the_watchdog(monkeypatch, capsys):
    rows = Rows()
    monkeypatch.setattr("polyphase.engine.reliability.watchdog._PERIOD_S", 0.05)
    trainer = engine(callbacks=Broken())
    trainer.fit(Notes(rows), loader(rows))
    assert trainer.callbacks[0].is_alive
    assert capsys.readouterr().err.count("the watchdog failed, and continues") == 1


class Broken(Callback):
    """Takes from the watchdog what it looks at."""

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.heartbeat.place = None
        time.sleep(0.5)
        self.is_alive = any(thread.name == "polyphase-watchdog" for thread in threading.enumerate())
        del trainer.heartbeat.place


class FailsInBackward(Regression):
    """Rank 1 does, and keeps its connections until its process ends: so late rank 0 hears of it."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            loss.register_hook(lambda _: 1 // 0)
        return loss


def test_a_rank_that_was_asked_to_end_waits_for_no_launcher(monkeypatch):
    monkeypatch.setattr(failure, "_GRACE_S", 60.0)
    begin = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError"):
        Engine(strategy="ddp_fork", devices=2, max_steps=1, **QUIET).fit(FailsInBackward(), rows())
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("when", ["the watchdog has just stopped", "its logs are finished"])
def test_a_request_that_comes_while_a_rank_stops_is_one(monkeypatch, when):
    """The trainer's handler only notes it."""
    monkeypatch.setattr(failure, "_GRACE_S", 60.0)
    assert in_a_fork(_asked_when, when, timeout_s=20) == ["noted"]


def _asked_when(when):
    noted = []
    signal.signal(signal.SIGTERM, lambda *_: noted.append("noted"))
    first = {"rank": 1, "kind": "exception", "by": 1, "message": "ValueError: this rank has had enough"}
    if when == "its logs are finished":
        failure._follow(None, 0, first, RuntimeError("lost"), _ask, None)
    else:
        requests = Wakeup()
        requests.begin()
        peers = SimpleNamespace(has_ended=lambda rank: _ask() or rank == 1)  # asked for as soon as it has stopped
        watchdog = SimpleNamespace(peers=peers, stop_but_listen=lambda: requests)
        failure._follow(None, 0, first, RuntimeError("lost"), lambda: None, watchdog)
    return noted


def _ask():
    os.kill(os.getpid(), signal.SIGTERM)
