"""Two nodes, of which one dies without a word and comes back: the other goes on alone, and makes room for it again.

A node is an agent of its own, on loopback.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ..distributed import free_port
from .storm import JOB, TORCHRUN, Job, judge, undisturbed

SIZES = (480, 2)
"""Samples and epochs."""


def wait_for(condition: Callable[[], bool], what: str, folder: Path, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {timeout_s} s:\n{(folder / 'log.txt').read_text()[-4000:]}")
        time.sleep(0.1)


def trains(folder: Path, num_ranks: int, since: float) -> bool:
    """Whether the newest start has that many ranks, all of which have trained."""
    starts = sorted(folder.glob("start-*"))
    if not starts:
        return False
    newest = starts[-1].name.rpartition("-")[0]
    sizes = [path.stat().st_size for path in starts if path.name.startswith(newest)]
    return int(newest.split("-")[1]) > since * 1e9 and len(sizes) == num_ranks and all(sizes)


def meeting(port: int) -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]


def kill_rank(node: subprocess.Popen) -> None:
    next(p for p in psutil.Process(node.pid).children(recursive=True) if str(JOB) in p.cmdline()).kill()


def kill(node: subprocess.Popen) -> None:
    """All of its processes at once."""
    for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
        process.kill()
    node.wait()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_global_batch_and_each_sample_stay(tmp_path):
    undisturbed(tmp_path / "calm", "fsdp", *SIZES, dropout=0.0)
    folder = tmp_path / "elastic"
    port = free_port()
    launcher = [sys.executable, "-m", "polyphase.engine", "launch", "--nnodes=1:2", "--nproc=1", *meeting(port)]
    launcher += ["--max-restarts=100"]

    def node(has_store: bool = False) -> Job:
        # Without the key-value store no torchrun can go on, so the node that dies must not be the one that has it.
        conf = f"--rdzv-conf=last_call_timeout=3,is_host={str(has_store).lower()}"
        return Job(folder, "fsdp", *SIZES, pause_s=0.1, dropout=0.0, launcher=[*launcher, conf, "--"])

    began = time.time()
    with node(has_store=True) as first:
        with node() as second:
            wait_for(lambda: trains(folder, 2, began), "step of two ranks", folder)
            time.sleep(1.0)
            kill(second)
            killed = time.time()
        wait_for(lambda: trains(folder, 1, killed), "step of one rank", folder)
        alone = time.time()
        kill_rank(first)  # what is left of the job keeps the global batch when it is started once more
        wait_for(lambda: trains(folder, 1, alone), "step of one rank again", folder)
        alone_again = time.time()
        with node() as again:
            wait_for(lambda: trains(folder, 2, alone_again), "step of two ranks again", folder)
            assert first.wait(120) == again.wait(60) == 0
    outcome = judge(folder, tmp_path / "calm", *SIZES, [killed, alone])
    print(f"\n{outcome}")
    assert (outcome.lost, outcome.repeated) == (0, 0)
    assert outcome.difference < 1e-5  # another number of ranks sums in another order
    assert "accumulate_grad_batches=2 in place of 1 keeps the global batch" in (folder / "log.txt").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_process_of_either_of_two_nodes_dies(tmp_path):
    """Each agent counts the restarts for itself, so the nodes disagree on which start it is."""
    sizes = (120, 1)
    undisturbed(tmp_path / "calm", "ddp", *sizes)
    folder, port = tmp_path / "nodes", free_port()
    launcher = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *meeting(port)]
    with (
        Job(folder, "ddp", *sizes, pause_s=0.1, launcher=launcher) as first,
        Job(folder, "ddp", *sizes, pause_s=0.1, launcher=launcher) as second,
    ):
        kills = [0.0]
        for node in (second, second, first):
            wait_for(lambda: trains(folder, 2, kills[-1]), "step of two ranks", folder)
            kills.append(time.time())
            kill_rank(node)
        assert first.wait(120) == second.wait(60) == 0
    outcome = judge(folder, tmp_path / "calm", *sizes, kills[1:])
    print(f"\n{outcome}")
    assert (outcome.lost, outcome.repeated, outcome.difference) == (0, 0, 0.0)
