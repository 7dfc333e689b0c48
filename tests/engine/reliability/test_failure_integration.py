"""A rank that raises ends the whole run: named once, in a few lines, within seconds, with a non-zero exit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.multiprocessing import ProcessRaisedException

from tests.chaos.hooks import AFTER, BEFORE, HOOKS, ending
from tests.distributed import ROOT, free_port, run_command, torchrun
from tests.engine.tiny import Regression, engine, rows
from tests.pairs import alternating

SCRIPT = """
import sys
import time
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from polyphase.engine import Engine

class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep(0.05)  # for the gradients of the layers behind it to be on their way
        raise ValueError("this rank has had enough")

class Fails(LightningModule):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 64)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        if batch_idx == 3:
            if sys.argv[2] not in ("all", str(self.global_rank)):
                time.sleep(float(sys.argv[6]) if "backward" in sys.argv else 0.0)
            elif "backward" in sys.argv:
                x = FailsInBackward.apply(x)
            else:
                raise ValueError("this rank has had enough")
        return self.layers(x).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    engine = Engine(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, enable_progress_bar=False, logger=False,
        compression=sys.argv[5] if len(sys.argv) > 5 else "none",
        callbacks=[OnExceptionCheckpoint(sys.argv[3])],  # saves with a barrier, which must not wait for the failed rank
    )
    engine.fit(Fails(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fails.py"
    path.write_text(SCRIPT)
    return path


def first_line_with(output: str, text: str) -> int:
    return next((i for i, line in enumerate(output.splitlines()) if text in line), sys.maxsize)


@pytest.mark.parametrize(("strategy", "rank"), alternating(["ddp_spawn", "ddp", "fsdp"], [0, 1]))
def test_the_failed_rank_is_named_and_the_run_ends(strategy, rank, script, tmp_path):
    started = time.monotonic()
    # The deadline is the test that nobody hangs: imports take most of the time, the end itself a few seconds.
    finished = run_command([sys.executable, script, strategy, str(rank), tmp_path], timeout_s=60)
    assert time.monotonic() - started < 60
    assert finished.returncode not in (0, None)
    # Once, with the user's frames alone, and without a word of what it has caused.
    lines = finished.output.splitlines()
    assert lines.count("ValueError: this rank has had enough") == 1, finished.output
    assert "Connection closed by peer" not in finished.output
    assert "Connection reset by peer" not in finished.output
    begin = first_line_with(finished.output, f"[rank {rank}] failed and ends the run; rank {1 - rank} stopped because")
    end = lines.index("ValueError: this rank has had enough")
    assert 0 < end - begin <= (16 if strategy == "ddp_spawn" else 6), finished.output
    frames = [line for line in lines if line.lstrip().startswith('File "') and "fails.py" in line]
    assert frames[-1].endswith("in training_step")
    report = the_report()
    assert finished.output.count(str(report["path"])) == 1
    assert report["first_failing_rank"] == rank
    assert report["what_to_do"] is None, "an error of one's own"
    assert report["run"], "as the manifests of its checkpoints have it"
    assert "lightning/pytorch/loops/fit_loop.py" in report["exception"]["traceback"]


KNOWN = """
from tests.engine.tiny import Regression, engine, rows

class OpensTooMany(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise OSError(24, "Too many open files")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    engine(strategy="ddp_fork", devices=2).fit(OpensTooMany(), rows())
"""


def test_an_error_that_many_meet_has_its_remedy(tmp_path):
    (tmp_path / "known.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{KNOWN}")
    finished = run_command([sys.executable, tmp_path / "known.py"], timeout_s=60)
    assert finished.returncode not in (0, None)
    assert ". What to do: `ulimit -n 65536`" in finished.output, finished.output
    assert the_report()["what_to_do"].startswith("`ulimit -n 65536`")


# Rank 0 has the store. Its process lives on for a while after its failure, as at any end that takes long.
LATE = """
import atexit
import sys
import time
from polyphase.engine.distributed.job_store import _StoreLine
from tests.engine.tiny import Regression, engine, rows

class Late(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            atexit.register(time.sleep, 4)
            raise ValueError("this rank has had enough")
        time.sleep(3.5)
        raise ValueError("this rank has had enough too late")
    def setup(self, stage):
        ask = _StoreLine.ask
        def told(line, method, *arguments):
            if self.global_rank == 1:
                print("asks", method, *(each for each in arguments if isinstance(each, str)), flush=True)
            return ask(line, method, *arguments)
        _StoreLine.ask = told

if __name__ == "__main__":
    engine(strategy="ddp", devices=2).fit(Late(), rows())
"""


def test_a_rank_that_has_let_the_failed_one_end_makes_no_further_call_of_its_store(tmp_path):
    """The store may be gone at any moment then, and torch prints each call that fails with its C++ stack."""
    path = tmp_path / "late.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LATE}")
    finished = run_command([sys.executable, path], timeout_s=60)
    calls = [line for line in finished.output.splitlines() if line.startswith("asks ")]
    assert calls[-1].endswith("first_failure/done"), finished.output
    assert sum(call.endswith("first_failure/done") for call in calls) == 1


def the_report() -> dict[str, Any]:
    """The one and only, and where it is."""
    (path,) = Path("failures").iterdir()
    return {**json.loads(path.read_text()), "path": path.absolute()}


def test_all_ranks_fail_alike(script, tmp_path):
    finished = run_command([sys.executable, script, "ddp_fork", "all", tmp_path], timeout_s=60)
    assert finished.returncode == 1
    first = the_report()["first_failing_rank"]
    assert f"[rank {first}] failed and ends the run; rank {1 - first} failed with the same error." in finished.output
    assert finished.output.splitlines().count("ValueError: this rank has had enough") == 1
    assert 'raise ValueError("this rank has had enough")' in the_report()["ranks"][str(1 - first)]["traceback"]


CHECKED = ((BEFORE, "plain"), ("setup", "hand"), ("configure_model", "plain"), (AFTER, "plain"), (AFTER, "hand"))
"""Hooks that `make test` has."""
REST = [(hook, launcher) for hook in HOOKS for launcher in ("plain", "hand") if (hook, launcher) not in CHECKED]


@pytest.mark.parametrize(
    ("hook", "launcher"), [*CHECKED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in REST)]
)
@pytest.mark.timeout(300)
def test_an_exception_in_any_hook_ends_all_ranks(hook, launcher, tmp_path):
    found = ending(hook, launcher, folder=tmp_path)
    print(found)
    assert all(found.codes), found.output
    assert -9 not in found.codes
    assert (found.num_messages, found.num_left) == (1, 0), found.output
    if hook == BEFORE:
        assert "because of rank 1: " in found.output


def test_the_user_can_have_all_frames(script, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYPHASE_TRACEBACK", "full")
    finished = run_command([sys.executable, script, "ddp_fork", "1", tmp_path], timeout_s=60)
    assert "lightning/pytorch/loops/fit_loop.py" in finished.output
    assert " frames of lightning" not in finished.output
    assert "ValueError: this rank has had enough" in finished.output


def test_workers_of_a_script_without_a_guard(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    finished = run_command([sys.executable, path, "ddp_spawn", "1", tmp_path], timeout_s=90)
    assert finished.returncode == 1
    *_, call, count, error, last = finished.output.rstrip().splitlines()
    assert call == "    engine.fit(Fails(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))"
    assert "frames of lightning, polyphase" in count
    assert "ProcessExitedException: strategy 'ddp_spawn' starts workers that run this script from its first" in error
    assert last == 'put the start of training under `if __name__ == "__main__":`, or leave out _spawn.'


def test_the_parent_has_the_workers_exception(script):
    """As a script that catches it sees it."""
    with pytest.raises(ProcessRaisedException, match=r"(?s)frames of .*\nValueError: of rank [01]") as raised:
        engine(strategy="ddp_fork", devices=2, callbacks=[Raises()]).fit(Regression(), rows())
    assert isinstance(raised.value.__cause__, ValueError)


class Raises(Callback):
    def on_train_batch_start(self, trainer, *args):
        raise ValueError(f"of rank {trainer.global_rank}")


INTERRUPTED = """
import time
from tests.engine.tiny import Regression, engine, rows

class Waits(Regression):
    def on_train_start(self):
        print("waits", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    engine(strategy="ddp", devices=2).fit(Waits(), rows())
"""


@pytest.mark.nightly  # test_endings_integration.py has it under each launcher, in mid-step
def test_ctrl_c(tmp_path):
    """Reaches all processes of a terminal."""
    script = tmp_path / "waits.py"
    script.write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        num_waiting = 0
        while num_waiting < 2 and (line := process.stdout.readline()):
            num_waiting += line.count("waits")  # both may write at once
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.count("was interrupted (Ctrl-C)") == 1
    assert not Path("failures").exists()


@pytest.mark.parametrize("start", ["-c", ""])
def test_without_a_script_there_is_nothing_to_start_once_more(start, monkeypatch):
    monkeypatch.setattr(sys, "argv", [start])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(ValueError, match=r"'ddp' runs the script once per device, but there is no script"):
        engine(strategy="ddp", devices=2).fit(Regression(), rows())


# As SLURM starts them: nobody ends a rank because of another.
BOTH_RANKS = """
port=$1; shift
for rank in 0 1; do
    env LOCAL_RANK=$rank NODE_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$@" & ranks="$ranks $!"
done
for rank in $ranks; do wait $rank; echo "ended with $?"; done
"""


@pytest.mark.parametrize(("compression", "late_s"), alternating(["bf16", "none"], [0.5, 10.0]))
def test_a_rank_that_fails_amid_backward_ends(compression, late_s, script, tmp_path):
    """With gradients on their way, that wait for the other rank."""
    script = [sys.executable, script, "ddp:bucket_cap_mb=0.01", "1", tmp_path, "backward", compression, str(late_s)]
    finished = run_command(["sh", "-c", BOTH_RANKS, "sh", str(free_port()), *script], timeout_s=60)
    assert finished.output.count("ended with 1\n") == 2, finished.output
    assert "ValueError: this rank has had enough" in finished.output


def test_under_torchrun(script, tmp_path):
    finished = torchrun(script, "ddp", "1", str(tmp_path), timeout_s=60)
    assert finished.returncode not in (0, None, -9)
    assert "ValueError: this rank has had enough" in finished.output
    assert "[rank 1] failed and ends the run; rank 0 stopped because of it." in finished.output
    assert finished.output.splitlines().count("ValueError: this rank has had enough") == 1
