"""Nobody waits for ever, and nobody is left behind: whatever ends, and in whatever order, all processes do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.distributed import free_port, run_command, warmed
from tests.pairs import nightly

SCRIPT = Path(__file__).with_name("faulty_run.py")

pytestmark = pytest.mark.timeout(300)


def command(strategy: str, rank: int, trouble: str, timeout_s: float, devices: int = 2) -> list[str]:
    return [sys.executable, str(SCRIPT), strategy, str(devices), str(rank), trouble, str(timeout_s)]


def the_report() -> dict[str, Any]:
    (path,) = Path("failures").iterdir()
    return json.loads(path.read_text())


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)


def left_running() -> list[int]:
    """Of the processes that wrote their number into a file, those that are there."""
    pids = [int(path.read_text() or 0) for path in Path().glob("*.pid")]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_rank_that_hangs_after_rank_0_is_done_ends():
    finished = run_command(command("ddp", 1, "late_for_ever", 4), timeout_s=120)
    assert finished.returncode == 1, finished.output  # of rank 0, whose part went well
    assert "rank 0 is done" in finished.output
    report = the_report()
    assert (report["first_failing_rank"], report["kind"]) == (1, "hang")
    assert report["ranks"]["1"]["line"].endswith("in on_fit_end")


def test_a_rank_that_never_comes_is_named():
    finished = run_command(command("ddp", 1, "absent", 2), timeout_s=120)
    assert finished.returncode == 1, finished.output
    assert "hang, because of rank 1: rank 1 of 2 did not connect within " in finished.output
    report = the_report()
    assert (report["first_failing_rank"], report["kind"], report["written_by"]["rank"]) == (1, "hang", 0)


ELSEWHERE = "no.such.host.invalid"


@pytest.mark.parametrize(
    ("rank", "address", "more"),
    [
        (0, ELSEWHERE, {}),  # it has opened its store all the same, and waits for the other one
        (1, ELSEWHERE, {}),
        *nightly(
            (0, "192.0.2.1", {}),
            (1, "192.0.2.1", {}),
            # torchrun's agent is gone
            (0, "127.0.0.1", {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": 0}),
        ),
    ],
)
def test_where_a_rank_looks_for_the_others_is_named(rank, address, more, monkeypatch):
    port = free_port()
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port, **more}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    finished = run_command(command("ddp", 1, "alone", 2, devices=2 if more else 1), timeout_s=60)
    assert finished.returncode == 1, finished.output
    said = f"rank {1 - rank} of 2 did not connect within \\d s at {address}:{port} \\(MASTER_ADDR and MASTER_PORT\\)"
    assert re.search(said, finished.output), finished.output


def test_an_address_on_which_rank_0_can_not_listen_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", ELSEWHERE)
    finished = run_command(command("ddp_fork", 1, "none", 10), timeout_s=60)
    assert finished.returncode == 1, finished.output
    assert f"rank 0 can't listen on {ELSEWHERE}:" in finished.output
    assert " (MASTER_ADDR and MASTER_PORT), for the others: [Errno -2] Name or service not known" in finished.output


def test_a_rank_that_ends_before_the_others_know_it_is_named():
    finished = run_command(command("ddp", 1, "exit_early", 60), timeout_s=120)
    assert finished.returncode != 0
    report = the_report()
    assert (report["first_failing_rank"], report["kind"]) == (1, "death")


def test_workers_that_are_stuck_end_with_their_rank():
    finished = run_command(command("ddp", 1, "loader_worker", 4), timeout_s=120)
    assert finished.returncode == 1, finished.output
    assert len(list(Path().glob("worker*.pid"))) == 2
    wait_for(lambda: not left_running(), "end of all", 15)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_ranks_end_with_the_process_that_started_them(strategy):
    started = subprocess.Popen(warmed(command(strategy, 1, "sleep_deaf", 300)), start_new_session=True)
    try:
        wait_for(lambda: len(list(Path().glob("rank*.pid"))) == 2, "rank")
        time.sleep(3)  # rank 1 sleeps, and rank 0 waits for it
        rank_0 = psutil.Process(int(Path("rank0.pid").read_text()))  # which is that process itself, under ddp
        (rank_0 if strategy == "ddp" else rank_0.parent()).kill()
        started.wait()
        wait_for(lambda: not left_running(), "end of all", 30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        warm.kill_rest(started.pid)


@pytest.mark.parametrize("strategy", ["single", "ddp", "ddp_fork", *nightly("ddp_spawn")])
def test_ctrl_c_ends_all_with_130(strategy):
    words = command(strategy, 0, "interrupt", 300, 1 if strategy == "single" else 2)
    # Rank 0 interrupts its process group, of which a warm worker is not.
    finished = run_command(words, timeout_s=120, cold=strategy == "ddp_spawn")
    assert finished.returncode == 128 + signal.SIGINT, finished.output
    assert len(finished.output.splitlines()) < 60, finished.output
    assert not Path("failures").exists()
    assert not left_running()
    if strategy == "single":
        assert sorted(Path("snapshots").glob("step=24"))


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "ddp_fork", *nightly("ddp_spawn", "fsdp", "local_sgd:sync_every=8")]
)
def test_ctrl_c_stops_all_after_one_step_and_loses_nothing(strategy):
    words = command(strategy, 0, "interrupt_once", 300, 1 if strategy == "single" else 2)
    finished = run_command(words, timeout_s=120, cold=strategy == "ddp_spawn")
    assert finished.returncode == 128 + signal.SIGINT, finished.output
    assert finished.output.count("the run stops after this step") == 1
    assert "Traceback" not in finished.output
    assert "exited unexpectedly" not in finished.output, "the loaders' workers get Ctrl-C, too"
    assert not Path("failures").exists()
    assert not left_running()
    (newest,) = [int(path.name[5:]) for path in Path("snapshots").glob("step=*") if path.name > "step=20"]
    assert newest == 25 if strategy == "single" else newest > 24


def test_an_interrupted_rank_0_has_the_time_to_end_when_the_others_have_ended():
    finished = run_command(command("ddp", 0, "interrupt_slowly", 300), timeout_s=120)
    assert finished.returncode == 128 + signal.SIGINT, finished.output
    assert Path("saved").exists()
    assert not left_running()


@pytest.mark.parametrize("strategy", ["local_sgd:sync_every=2", "ddp"])
def test_the_rank_of_the_first_loss_that_is_not_finite_is_named(strategy):
    finished = run_command(command(strategy, 1, "nan", 60), timeout_s=120)
    assert finished.returncode != 0
    said = "the loss was not finite at step 17 (epoch 0) on rank 1"
    assert said in finished.output, finished.output
    report = the_report()
    assert report["first_failing_rank"] == 1
    assert said in report["message"]
