"""A call to a store that does not answer ends; what the kernel of another process says of it is believed."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from polyphase.engine.distributed import job_store as store_line
from polyphase.engine.distributed.job_store import JobStore, ProcessState, StoreLostError, probe


def serve(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(60)


@pytest.fixture
def server():
    """The number of a store's process, and its port."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(there,))
    process.start()
    yield process.pid, here.recv()
    process.kill()
    process.join()


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)  # it has stopped


def test_a_store_that_does_not_answer_is_lost(server, monkeypatch):
    process, port = server
    job = JobStore(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2)
    other = job.clone()
    job.write("word", {"x": 1})
    assert job.read("word", {"x": int}) == {"x": 1}  # torch's store does not answer a write
    assert other.read("word", {"x": int}) == {"x": 1}
    stop(process)
    job.line.patience_s, began = 1.0, time.monotonic()
    monkeypatch.setattr(store_line, "_LONGEST_S", 3.0)  # its kernel answers, and so there is more patience
    with pytest.raises(StoreLostError, match=rf"store at 127.0.0.1:{port} has not answered for 3 s"):
        job.has("word")
    assert 2.5 < time.monotonic() - began < 10
    with pytest.raises(StoreLostError):  # at once, over the other connection, too
        other.has("word")
    assert time.monotonic() - began < 10


def test_who_waits_may_give_up_and_a_late_answer_is_in_time(server):
    process, port = server
    job = JobStore(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2)
    stop(process)
    looks = []
    job.line.gives_up = lambda: looks.append(job.line.waited_s) or os.kill(process, signal.SIGCONT)
    assert not job.has("word")
    assert looks
    stop(process)
    job.line.gives_up = lambda: True
    with pytest.raises(StoreLostError, match=r"has not answered for \d+ s"):
        job.has("word")


def test_the_kernel_says_whether_a_process_lives():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert probe("127.0.0.1", port) == ProcessState.LIVES
    assert probe("127.0.0.1", port) == ProcessState.ENDED
    assert probe("", 0) == ProcessState.UNKNOWN


def test_a_run_leaves_no_thread_behind_and_the_next_call_starts_one(server):
    _, port = server
    before = set(threading.enumerate())
    job = JobStore(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2)
    for value in (1, 2):
        job.write("word", {"x": value})
        assert len(set(threading.enumerate()) - before) == 1
        store_line.end_threads()
        assert set(threading.enumerate()) <= before, "one of an earlier test may have ended, too"
    assert job.read("word", {"x": int}) == {"x": 2}
