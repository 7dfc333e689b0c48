"""Several runs in one folder at once, and `polyphase ckpt prune` beside them: one trains there, nothing is lost."""

import os
import time
import traceback
from pathlib import Path

import pytest

from polyphase.engine.checkpoint import CheckpointError, find
from polyphase.engine.checkpoint.retention import list_entries, prune

from ..distributed import in_a_fork
from .job import main

NUM_SAMPLES, NUM_EPOCHS = 40, 2
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // 2


def run(folder: Path) -> None:
    """One of the runs, whose end is its exit code: 0 trained, 3 refused."""
    code = 1
    try:
        main(folder, "single", NUM_SAMPLES, NUM_EPOCHS, pause_s=0.1)
        code = 0
    except CheckpointError as refused:
        code = 3 if "is in use: " in str(refused) else 1
    finally:
        if code == 1:
            traceback.print_exc()
        os._exit(code)


def meet(folder: Path, num_runs: int) -> tuple[list[int], int, list[str]]:
    """All runs at once, and while one is half done, a prune beside it, again and again.

    Returns:
        The runs' exit codes, how often `prune` was refused, and what it removed.
    """
    children = []
    for _ in range(num_runs):
        child = os.fork()
        if child == 0:
            run(folder)
        children.append(child)
    codes, removed = [], []
    num_refused = 0
    while children:
        time.sleep(0.02)
        try:
            if 0 < max((manifest.step for _, manifest in find(folder / "snapshots")), default=0) < NUM_STEPS // 2:
                removed += prune(folder / "snapshots", keep_last=1).removed
        except CheckpointError as refused:
            num_refused += "is in use: process " in str(refused)
        for child in [*children]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                codes.append(os.waitstatus_to_exitcode(status))
    return codes, num_refused, removed


@pytest.mark.parametrize("num_runs", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_one_run_trains_and_the_others_and_prune_are_refused(num_runs, tmp_path):
    codes, num_refused, removed = in_a_fork(meet, tmp_path, num_runs, timeout_s=110)
    assert sorted(codes) == [0, *[3] * (num_runs - 1)]
    assert len([*tmp_path.glob("start-*")]) == 1
    assert num_refused > 0
    assert removed == []
    assert {entry.kind for entry in list_entries(tmp_path / "snapshots")} == {"checkpoint"}
    steps = [manifest.step for _, manifest in find(tmp_path / "snapshots")]
    assert steps == [NUM_STEPS, NUM_STEPS - 1]
