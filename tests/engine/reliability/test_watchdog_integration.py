"""A rank that hangs or dies is named, with its phase and line, and the whole run ends soon."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Finished, run_command, torchrun
from tests.pairs import nightly

SCRIPT = Path(__file__).with_name("faulty_run.py")


def run(strategy: str, rank: int, trouble: str, *, devices: int = 2, timeout_s: float = 3) -> Finished:
    return run_command(
        [sys.executable, SCRIPT, strategy, str(devices), str(rank), trouble, str(timeout_s)], timeout_s=90
    )


def line_of(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def the_report() -> dict[str, Any]:
    """The one and only."""
    (path,) = Path("failures").iterdir()
    return json.loads(path.read_text())


def test_a_rank_that_sleeps_is_named_with_its_line_and_all_ranks_say_where_they_are():
    finished = run("ddp", 1, "sleep")
    assert finished.returncode == 1
    sleeps = line_of('self._meets("sleep")') + 1
    line = f"{SCRIPT}:{sleeps} in _trouble"
    said = finished.output
    assert "hang, because of rank 1: no progress for 3 s; rank 1 is in phase 'train' of step 24" in said
    assert f"computes, at {line}" in said
    assert re.search(r"\nrank 0: is in phase 'train' .* waits for other ranks in backward, at ", said)
    assert re.search(rf"\nThe stack of rank 1:\n(  .*\n)+  File \"{SCRIPT}\", line {sleeps}, in _trouble\n", said)
    assert said.count("no progress for") == 1
    assert len(said.splitlines()) <= 40, said
    assert "/torch/" not in said
    report = the_report()
    assert (report["first_failing_rank"], report["kind"], report["exception"]) == (1, "hang", None)
    here = report["ranks"]["1"]
    assert {"step": 24, "batch": 25, "phase": "train", "line": line, "pending": None}.items() <= here.items()
    assert "time.sleep(100)" in here["stack"]
    assert report["ranks"]["0"]["pending"] == "backward"
    assert report["resume_from"] == str(Path("snapshots/step=20").absolute())
    assert {"polyphase", "torch", "lightning", "python"} == set(report["versions"])


def test_a_slow_loader_is_told_from_slow_compute():
    finished = run("fsdp", 1, "loader")
    assert finished.returncode == 1
    assert "because of rank 1: no progress for 3 s; rank 1 is in phase 'fetch'" in finished.output
    assert "waits for its data loader, at" in finished.output
    report = the_report()
    assert report["ranks"]["1"]["line"].endswith(f"faulty_run.py:{line_of('if self.is_stuck') + 1} in __getitem__")
    assert report["ranks"]["0"]["pending"] is not None


@pytest.mark.parametrize(("trouble", "pending"), [("validation", None), ("barrier", "barrier")])
def test_in_validation(trouble, pending):
    # `validation`: rank 0 stands still. `barrier`: rank 1 alone waits in one, for rank 0, which waits for it elsewhere.
    finished = run("ddp", 0, trouble)
    assert finished.returncode == 1
    report = the_report()
    assert report["kind"] == "hang"
    if trouble == "validation":
        assert report["first_failing_rank"] == 0
        assert report["ranks"]["0"]["phase"] == "validate"
        assert report["ranks"]["0"]["evaluated"] < report["ranks"]["1"]["evaluated"]
    else:
        assert report["ranks"]["1"]["pending"] == pending


def test_a_rank_that_was_stopped_does_not_answer_and_is_ended():
    finished = run("ddp", 1, "stop")  # which waits for the end of all processes
    assert finished.returncode == 1
    assert "hang, because of rank 1" in finished.output
    assert "and it does not answer" in finished.output
    assert the_report()["first_failing_rank"] == 1


@pytest.mark.parametrize(("rank", "trouble"), [*nightly((1, "kill")), (0, "kill"), (1, "kill_unnoticed")])
def test_a_rank_that_is_killed_ends_the_others(rank, trouble):
    finished = run("ddp", rank, trouble, timeout_s=60)
    assert finished.returncode != 0
    assert time.time() - float(Path("killed").read_text()) < 10
    report = the_report()
    assert (report["first_failing_rank"], report["kind"]) == (rank, "death")
    assert report["message"].startswith("its process has ended without an error message")
    assert "out-of-memory killer" in report["what_to_do"]
    assert report["written_by"]["rank"] == 1 - rank


@pytest.mark.parametrize("rank", [0, *nightly(1)])
def test_a_rank_that_is_killed_under_torchrun(rank):
    finished = torchrun(SCRIPT, "fsdp", "2", str(rank), "kill", "60", timeout_s=90)
    assert finished.returncode == 1
    assert time.time() - float(Path("killed").read_text()) < 10
    assert (the_report()["first_failing_rank"], the_report()["kind"]) == (rank, "death")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_done_is_not_dead(rank):
    finished = run("ddp", rank, "late", timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert not Path("failures").exists()


def test_time_in_which_the_machine_slept_does_not_count():
    finished = run("single", 0, "pause", devices=1)
    assert finished.returncode == 0, finished.output
    assert "rank 0 is done" in finished.output
    assert not Path("failures").exists()  # while the machine slept, no time went by


def test_a_process_alone_is_ended_where_torchrun_starts_it_again():
    finished = torchrun(SCRIPT, "single", "1", "0", "sleep", "2", nproc=1, timeout_s=60)
    assert finished.returncode == 1
    assert "hang, because of rank 0: no progress for 2 s; rank 0 is in phase 'train'" in finished.output
    assert the_report()["ranks"]["0"]["step"] == 24
