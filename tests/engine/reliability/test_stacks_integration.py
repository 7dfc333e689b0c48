"""`polyphase stacks` beside two ranks: one sleeps, keeps Python's lock, or is stopped; afterwards the run goes on."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from polyphase.engine.reliability.heartbeat import Heartbeat
from polyphase.engine.reliability.rendezvous import RankRegistry, connect
from polyphase.engine.reliability.stack_answers import StackAnswers
from polyphase.engine.reliability.stacks import NativeError, _find_py_spy, _native_threads, _running_ranks, ask
from tests.distributed import run_command, run_ranks
from tests.engine.tiny import as_rank, engine

STEPS = 6
AT = 3
SECRET = "swordfish", "77"
"""Joined, it is a value that stands in no source line."""


class Stuck(LightningModule):
    """Rank 1 stands still at one batch; rank 0 waits for it in backward, while a thread asks from another process."""

    def __init__(self, trouble, *words):
        super().__init__()
        self.layer, self.trouble, self.words = torch.nn.Linear(4, 1), trouble, words

    def training_step(self, batch, batch_idx):
        if batch_idx == AT and self.global_rank == 0:
            self.thread = threading.Thread(target=self._ask)
            self.thread.start()
        elif batch_idx == AT:
            Path("pid").write_text(str(os.getpid()))
            Path("here").touch()
            self._stand_still()
        return self.layer(batch).sum()

    def _stand_still(self):
        password = "".join(SECRET)
        assert password
        if self.trouble == "sleeps":
            while not Path("go").exists():
                time.sleep(0.1)
        elif self.trouble == "locked":
            fifo = os.open("fifo", os.O_RDWR)
            ctypes.PyDLL(None).read(fifo, ctypes.create_string_buffer(1), 1)  # keeps Python's lock
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _ask(self):
        while not Path("here").exists():
            time.sleep(0.1)
        time.sleep(1)
        for number, words in enumerate(self.words):
            command = [sys.executable, "-m", "polyphase.engine", "stacks", ".", *words]
            finished = run_command(command, timeout_s=60)
            Path(f"told{number}").write_text(f"{finished.returncode}\n{finished.output}")
        if self.trouble == "locked":
            with open("fifo", "w") as fifo:
                fifo.write(".")
        elif self.trouble == "stopped":
            os.kill(int(Path("pid").read_text()), signal.SIGCONT)
        Path("go").touch()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank, trouble, *words):
    as_rank(rank)
    module = Stuck(trouble, *words)
    trainer = engine(strategy="ddp", devices=2, limit_train_batches=STEPS)
    trainer.fit(module, DataLoader(torch.ones(64, 4)))
    assert trainer.global_step == STEPS, "the run went on"
    if rank == 0:
        module.thread.join()


def told(trouble, *words):
    """What the command says to each of `words`, and its exit code."""
    os.mkfifo("fifo")
    run_ranks(_fit, 2, trouble, *words, start_method="fork", timeout_s=150)
    said = [Path(f"told{number}").read_text().split("\n", 1) for number in range(len(words))]
    return [(int(code), text) for code, text in said]


def line_of(text):
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def test_a_rank_that_sleeps_and_the_one_that_waits_for_it():
    (code, text), (_, plain) = told("sleeps", [], ["--json"])
    assert code == 0, text
    assert f"phase 'train' of step {AT}, batch {AT + 1}, waits for other ranks in backward" in text
    place = f'  File "{__file__}", line {line_of("time.sleep(0.1)")}, in _stand_still\n    time.sleep(0.1)\n'
    assert place in f"{text}\n"
    threads = json.loads(plain)["1"]["threads"]
    assert threads[0]["calls"][0] == [__file__, line_of("time.sleep(0.1)"), "_stand_still"]
    assert "polyphase-watchdog" in [thread["name"] for thread in threads]
    assert "".join(SECRET) not in text + plain, "files, lines and functions; no values"
    assert [entry for entry in _running_ranks() if entry.rank.root == os.getcwd()] == [], "nothing is left behind"


def test_a_rank_that_keeps_pythons_lock_writes_its_stacks_on_a_signal():
    ((code, text),) = told("locked", ["--timeout", "4"])
    assert code == 0, text
    assert "does not answer: some C code may keep Python's lock" in text
    assert f'File "{__file__}", line {line_of("ctypes.PyDLL(None)")}, in _stand_still' in text
    assert "waits for other ranks in backward" in text


def test_a_rank_that_is_stopped_is_named():
    ((code, text),) = told("stopped", ["--timeout", "4"])
    assert code == 1
    assert "rank 1: no stacks: process" in text
    assert "is stopped (SIGSTOP, or a debugger): kill -CONT" in text


def test_native_frames_by_py_spy():
    child = subprocess.Popen([sys.executable, "-c", "import time\ndef waits():\n  time.sleep(60)\nwaits()"])
    try:
        time.sleep(2)
        try:
            threads = _native_threads(_find_py_spy(), child.pid, 0)
        except NativeError as error:
            assert "ermission" in str(error)  # noqa: PT017 - ptrace is not allowed here, and py-spy says so
        else:
            names = [call[2] for call in threads[0]["calls"]]
            assert "waits" in names
            assert any(call[0].rpartition("/")[2].startswith(("libc", "python")) for call in threads[0]["calls"])
    finally:
        child.kill()
        child.wait()
    with pytest.raises(NativeError, match="py-spy:"):
        _native_threads(_find_py_spy(), child.pid, 0)


class _Counters:
    """The counters that a heartbeat reads."""

    def __init__(self, rank):
        self.global_rank, self.global_step, self.last_checkpoint, self.ckpt_path = rank, 7, None, None
        self.strategy = None
        progress = type("", (), {"total": type("", (), {"ready": 3})})
        loop = type("", (), {"batch_progress": progress})
        self.validate_loop = self.test_loop = self.predict_loop = loop
        epochs = type("", (), {"batch_progress": progress, "val_loop": loop})
        self.fit_loop = type("", (), {"epoch_loop": epochs})


def test_ranks_of_another_host_are_asked_through_the_store(tmp_path):
    run_ranks(_on_two_hosts, 2, str(tmp_path), start_method="fork", timeout_s=120)


def _on_two_hosts(rank, folder):
    socket.gethostname = lambda: f"host{rank}"
    heartbeat = Heartbeat(_Counters(rank))
    heartbeat.begin()
    answers = StackAnswers(heartbeat, folder, None, 2)
    answers.open()
    peers = RankRegistry("0", connect(dist.distributed_c10d._get_default_store(), rank, 2))
    deadline = time.monotonic() + 60
    while peers.absent or not peers.beats():
        peers.beat(heartbeat.report())
        assert time.monotonic() < deadline
    found = {}

    def ask_rank_0():
        here = [entry for entry in _running_ranks() if (entry.rank.root, entry.rank.rank) == (folder, 0)]
        found.update(ask(here, 30))
        peers.job.write("over", {})

    if rank == 0:
        thread = threading.Thread(target=ask_rank_0)
        thread.start()
    while not peers.job.has("over"):
        assert time.monotonic() < deadline
        answers.poll(peers)
        time.sleep(0.05)
    if rank == 0:
        thread.join()
        assert (found[1]["host"], found[1]["step"]) == ("host1", 7)
        assert "_on_two_hosts" in [call[2] for call in found[1]["threads"][0]["calls"]]
    answers.close()
    dist.barrier()
