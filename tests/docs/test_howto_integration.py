"""The pages under docs/howto whose code is about processes: interrupted, debugged, several at once, cut off."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests import warm
from tests.docs.pages import Page, environment
from tests.docs.test_howto import largest_difference, weights_of
from tests.pairs import nightly


def start(*command, strategy="single", devices=1, **popen):
    """A process in a group of its own, whose standard output can be read while it runs."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment(strategy, devices), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **popen,
    )


def end(process):
    """Ends what is left of it, with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    warm.kill_rest(process.pid)
    process.stdout.close()


@pytest.mark.parametrize(("strategy", "devices"), [*nightly(("single", 1)), ("ddp", 2)])
def test_ctrl_c_and_resume(tmp_path, strategy, devices):
    page = Page("stop-and-resume")
    command = ["python", "train.py"]
    undisturbed = page.run(*command, strategy=strategy, devices=devices)
    assert undisturbed.returncode == 0, undisturbed.output
    expected = weights_of(tmp_path / "end.ckpt")
    page.clear("end.ckpt")
    page.clear("snapshots")
    page.clear(".polyphase")  # else the run asks where its snapshots are

    process = start(sys.executable, "train.py", strategy=strategy, devices=devices)  # all ranks in one process group
    shown = ""
    try:
        for line in process.stdout:
            shown += line
            if "step 25/" in line:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 128 + signal.SIGINT, shown
    finally:
        end(process)
    assert "Stopped by Ctrl-C after" in shown
    assert "Traceback" not in shown
    resumed = page.run(*command, strategy=strategy, devices=devices)
    assert resumed.returncode == 0, resumed.output
    step = int(re.search(r"continues from .*step=(\d+)", resumed.output)[1])
    assert step >= 25, "nothing is lost"
    assert largest_difference(expected, weights_of(tmp_path / "end.ckpt")) == 0


@pytest.mark.nightly
def test_debugger_on_one_rank(tmp_path):
    Page("debugger")
    process = start("python", "train.py", strategy="ddp", devices=2, stdin=subprocess.PIPE)
    try:
        shown = ""
        while "-> return loss" not in shown:
            shown += process.stdout.readline()
        time.sleep(20)  # twice hang_timeout_s
        assert process.poll() is None, "the watchdog does not end who is debugged"
        rest, _ = process.communicate("p loss.item() > 0\np f'rank {self.global_rank}'\nc\n", timeout=60)
    finally:
        end(process)
    assert process.returncode == 0, shown + rest
    assert re.search(r"^(\(Pdb\) )?True$", rest, re.MULTILINE)  # the first prompt may have been read already
    assert "(Pdb) 'rank 0'" in rest
    assert (shown + rest).count("-> return loss") == 1, "the other rank does not stop"
    assert "max_steps=6" in rest


def test_several_runs_at_once(tmp_path):
    page = Page("several-runs")
    finished = page.run("bash", "-c", page.commands[0], timeout_s=170)
    outputs = [(tmp_path / f"run-{run}.txt").read_text() for run in (1, 2, 3)]
    assert finished.returncode == 0, finished.output
    folders = {re.search(r"^logs: (\S+)$", output, re.MULTILINE)[1] for output in outputs if "logs: " in output}
    assert len(folders) == 3, outputs
    for folder in folders:
        assert len(list((tmp_path / folder).glob("events.out.tfevents.*"))) == 1
        assert len(list((tmp_path / folder / "checkpoints").iterdir())) == 1


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_without_a_network(tmp_path):
    page = Page("no-network")
    # Nothing but loopback is there, which processes of one machine need to find each other.
    finished = page.run(*NO_NETWORK, "ip link set lo up && python train.py", strategy="ddp", devices=2)
    assert finished.returncode == 0, finished.output
    assert "test/accuracy" in finished.output


NO_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c"]


def test_own_strategy_and_comm_hook():
    finished = Page("own-strategy").run("env", "-u", "PL_TRAINER_STRATEGY", "python", "train.py")
    assert finished.returncode == 0, finished.output
    assert re.findall(r"batch (\d+) of each of 2 ranks", finished.output) == ["0", "10"]
    assert "max_epochs=1" in finished.output
