"""kill -9 at any time: the newest checkpoint is whole, and nothing else is ever taken for one."""

import sys

import pytest

from tests.distributed import ROOT, run_command


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("new paths", "survived 20 kills"),
        ("one path", "survived 20 kills"),
        ("lock", "the lock was free"),
        ("prune", "survived"),
    ],
)
def test_whoever_was_killed_left_all_in_order(tmp_path, what, says):
    command = [sys.executable, "-m", "tests.engine.checkpoint.killed", what, tmp_path / "folder", "1"]
    finished = run_command(command, cwd=ROOT)
    assert finished.returncode == 0, finished.output
    assert says in finished.output
