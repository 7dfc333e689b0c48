"""`polyphase launch` starts processes, starts them again when one of them dies, and passes on how they ended."""

import signal
import subprocess
import sys
import time

import pytest

from tests import warm
from tests.distributed import free_port, run_command

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


GOES_ON = """
import os, signal, sys
from pathlib import Path
import torch
from lightning.pytorch import Callback
from polyphase import Engine
from polyphase.callbacks import Snapshot
from polyphase.models import Digits, DigitsClassifier

class Accident(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        is_due = (trainer.global_step, len(trainer.rank_losses)) in ((4, 0), (6, 1))
        if is_due and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

class Classifier(DigitsClassifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

engine = Engine(strategy="STRATEGY", devices=3, accelerator="cpu", max_steps=12, global_batch_size=60,
    on_rank_loss="continue", callbacks=[Accident(), Snapshot(every_n_steps=2)], limit_val_batches=0,
    default_root_dir=".")
engine.fit(Classifier(), datamodule=Digits())
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
said = f"{engine.global_step} {[loss.ranks for loss in engine.rank_losses]}"
Path(f"end-{start}-{os.environ['RANK']}").write_text(said)
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""
LAUNCH_3 = [sys.executable, "-m", "polyphase.engine", "launch", "--nproc", "3", "--max-restarts", "0", "--", "job.py"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_others_go_on_without_killed_ranks_if_they_say_so(tmp_path, strategy):
    (tmp_path / "job.py").write_text(GOES_ON.replace("STRATEGY", strategy))
    # Warm ranks are not the processes that torchrun has started, so their numbers say nothing to it.
    finished = run_command(LAUNCH_3, timeout_s=240, cold=True)
    assert finished.returncode == 0, finished.output
    assert [path.name for path in tmp_path.glob("end-*")] == ["end-0-0"]
    assert (tmp_path / "end-0-0").read_text() == "12 [[0], [1]]"


@pytest.mark.timeout(300)
def test_node_0_goes_on_when_all_ranks_of_another_node_are_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "of both nodes")
    job = GOES_ON.replace("STRATEGY", "ddp").replace("devices=3", "devices=1, num_nodes=2")
    (tmp_path / "job.py").write_text(job.replace("trainer.global_rank == 0", "trainer.global_rank == 1"))
    place = f"--nproc 1 --max-restarts 0 --nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()}"
    nodes = [f"{sys.executable} -m polyphase.engine launch {place} --node-rank {node} -- job.py" for node in (1, 0)]
    finished = run_command(["sh", "-c", " & ".join(nodes)], timeout_s=240, cold=True)
    assert finished.returncode == 0, finished.output  # of node 0
    assert (tmp_path / "end-0-0").read_text() == "12 [[1]]"


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_after_the_run_is_a_failure(tmp_path):
    (tmp_path / "job.py").write_text(GOES_ON.replace("STRATEGY", "ddp"))
    finished = run_command([*LAUNCH_3, "dies at its end"], timeout_s=240, cold=True)
    assert finished.returncode == 1, finished.output


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
