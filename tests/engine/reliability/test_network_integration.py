"""Where the processes of a job on one machine listen, and what somebody else can do who reaches its store."""

import json
import sys
from pathlib import Path

import pytest

from tests.distributed import free_port, run_command
from tests.pairs import nightly

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch
from lightning.pytorch import Callback
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from polyphase.engine import Engine

ATTACK = '''
import os
import sys
import torch.distributed as dist
os.environ.pop("POLYPHASE_JOB_SECRET", None)
from polyphase.engine.distributed.job_store import JobStore

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
keys = store.list_keys()
attacked = {key for key in keys if "polyphase/" in key}
attacked |= {"/meeting/0/polyphase/first_failure", "/meeting/0/polyphase/watch/0/verdict/0"}
part = JobStore(dist.PrefixStore("meeting/0", store), 1, 8)
for key in attacked:
    store.set(key.removeprefix("/"), bytes(range(256)))
if sys.argv[2] == "forges":
    part.write("polyphase/first_failure", {"rank": 1, "kind": "hang", "by": 0, "message": "attacker"})
print(*sorted(attacked))
print("attacked", len(attacked), "words")
'''

MISLEADS = '''
import sys
import time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:  # what a rank writes is gone before another one reads it
    for rank in range(2):
        store.set(f"meeting/0/0//cpu//0/{rank}", bytes(range(256)))
'''

class Looks(Callback):
    def on_train_start(self, trainer, pl_module):
        listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        store = [place.ip for place in listening if str(place.port) == os.environ["MASTER_PORT"]]
        Path(f"store{trainer.global_rank}.json").write_text(json.dumps(store))
        assert not [name for name in os.environ if name.startswith("NCCL")]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        me = psutil.Process()
        if trainer.global_step == 3:
            listening = [c.laddr.ip for c in me.net_connections() if c.status == psutil.CONN_LISTEN]
            Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(listening))
        if sys.argv[2] in ("forges", "garbage"):
            if trainer.global_step == 3 and trainer.global_rank == 0:
                subprocess.run([sys.executable, "-c", ATTACK, os.environ["MASTER_PORT"], sys.argv[2]], check=True)
            import time
            time.sleep(0.5)

class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    if sys.argv[2] == "misleads" and "LOCAL_RANK" not in os.environ:
        subprocess.Popen([sys.executable, "-c", MISLEADS, os.environ["MASTER_PORT"]], stderr=subprocess.DEVNULL)
    engine = Engine(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=8, callbacks=[Looks()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    engine.fit(Linear(), DataLoader(torch.ones(32, 4), batch_size=2))
    print(f"rank {engine.global_rank} is done")
"""


def run(strategy: str, attack: str):
    Path("job.py").write_text(SCRIPT)
    # Processes that import nothing would have met before whoever misleads them is there.
    return run_command([sys.executable, "job.py", strategy, attack], cold=attack == "misleads", timeout_s=150)


@pytest.mark.parametrize("strategy", ["ddp", "ps", *nightly("ddp_fork", "fsdp")])
def test_all_listen_on_loopback_only(strategy):
    finished = run(strategy, "none")
    assert finished.returncode == 0, finished.output
    found = {rank: json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(2)}
    assert all(found.values())
    assert set(found[0] + found[1]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.nightly
def test_who_writes_other_addresses_of_gloo_ends_the_run_with_an_error(monkeypatch):
    """As docs/security.md says of torch's own entries, which are not signed."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    finished = run("ddp", "misleads")
    assert finished.returncode == 1, finished.output
    assert "rank 0 is done" not in finished.output
    assert "Error: " in finished.output
    assert {path.name for path in Path().iterdir()} <= {"job.py", "failures"}


@pytest.mark.parametrize("launch", ["torch.distributed.run", *nightly("polyphase.engine")])
def test_torchruns_own_store_listens_everywhere_and_the_ranks_on_loopback_only(launch):
    """As docs/security.md says: torchrun has no option for it."""
    Path("listens.py").write_text(SCRIPT)
    words = ["launch", "--nproc=2", "--"] if launch == "polyphase.engine" else ["--nproc-per-node=2"]
    command = [sys.executable, "-m", launch, *words, "listens.py", "ddp", "none"]
    finished = run_command(command, timeout_s=150)
    assert finished.returncode == 0, finished.output
    for rank in range(2):
        assert {*json.loads(Path(f"store{rank}.json").read_text())} & {"::", "0.0.0.0"}
        assert {*json.loads(Path(f"rank{rank}.json").read_text())} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
