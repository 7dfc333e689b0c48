"""A rank that raises ends the whole run: named first, within seconds, with a non-zero exit."""

import sys
import time
from pathlib import Path

import pytest

from tests.distributed import free_port, run_command, torchrun

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
            if self.global_rank != int(sys.argv[2]):
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp", "fsdp"])
def test_the_failed_rank_is_named_and_the_run_ends(strategy, rank, script, tmp_path):
    started = time.monotonic()
    # The deadline is the test that nobody hangs: imports take most of the time, the end itself a few seconds.
    finished = run_command([sys.executable, script, strategy, str(rank), tmp_path], timeout_s=60)
    assert time.monotonic() - started < 60
    assert finished.returncode not in (0, None)
    cause = first_line_with(finished.output, "ValueError: this rank has had enough")
    assert cause < sys.maxsize, finished.output
    # Consequences on the other rank, where it gets to say anything, come after or say whose fault it is.
    for consequence in ("Connection closed by peer", "Connection reset by peer"):
        assert first_line_with(finished.output, consequence) > first_line_with(finished.output, "had enough")


# As SLURM starts them: nobody ends a rank because of another.
BOTH_RANKS = """
port=$1; shift
for rank in 0 1; do
    env LOCAL_RANK=$rank NODE_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$@" & ranks="$ranks $!"
done
for rank in $ranks; do wait $rank; echo "ended with $?"; done
"""


@pytest.mark.parametrize("late_s", [0.5, 10.0])
@pytest.mark.parametrize("compression", ["none", "bf16"])
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
    assert "[rank 1] failed and ends the run" in finished.output
