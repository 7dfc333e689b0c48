"""`polyphase launch` starts processes, starts them again when one of them dies, and passes on how they ended."""

import signal
import subprocess
import sys
import time

from tests import warm
from tests.distributed import run_command

SCRIPT = """
import os
import signal
import sys
from pathlib import Path

start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
Path(f"start-{start}-{rank}").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['OMP_NUM_THREADS']} {sys.argv[1:]}")
if start == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_starts_all_of_them_again(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "polyphase.engine", "launch", "--nproc", "2", "--max-restarts", "1", "--"]
    finished = run_command([*command, "job.py", "--epochs", "5"], timeout_s=90)
    assert finished.returncode == 0, finished.output
    for rank in (0, 1):
        assert (tmp_path / f"start-1-{rank}").read_text() == "2 1 ['--epochs', '5']"


def test_modules_are_started_and_failures_passed_on(tmp_path):
    (tmp_path / "job.py").write_text("import sys; sys.exit(3)")
    command = [sys.executable, "-m", "polyphase.engine", "launch", "--nproc=1", "--max-restarts=0", "--", "-m", "job"]
    finished = run_command(command, timeout_s=90)
    assert finished.returncode == 1
    assert "exitcode  : 3" in finished.output


def test_processes_of_one_machine_share_a_secret(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYPHASE_JOB_SECRET", raising=False)
    (tmp_path / "job.py").write_text(
        "import os, pathlib\npathlib.Path(os.environ['RANK']).write_text(os.environ['POLYPHASE_JOB_SECRET'])\n"
    )
    command = [sys.executable, "-m", "polyphase.engine", "launch", "--nproc=2", "--", "job.py"]
    finished = run_command(command, timeout_s=90)
    assert finished.returncode == 0, finished.output
    assert len((tmp_path / "0").read_text()) == 64
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def test_sigterm_reaches_the_processes(tmp_path):
    (tmp_path / "job.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('told').touch(), sys.exit(143)))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    command = [warm.python(), "-m", "polyphase.engine", "launch", "--nproc", "1", "--", "job.py"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()  # and so what it stands for
        process.wait()
    assert (tmp_path / "told").exists()
