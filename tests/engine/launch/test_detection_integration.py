"""Processes that were started one by one, with a launcher's variables, or by a real `mpirun`, train as one run."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.distributed import ROOT, free_port, run_command, warmed

sys.path.append(str(ROOT / "benchmarks"))
from _namespaces import Namespaces

SCRIPT = """
from torch.utils.data import DataLoader
from tests.engine.tiny import QUIET, Engine, Positions, Seen

engine, module = Engine(**QUIET, strategy="ddp", max_epochs=1), Seen()
engine.fit(module, DataLoader(Positions(16), batch_size=4))
# With its end in one write: the ranks share a pipe, and what another writes would come between the two.
print(f"rank {engine.global_rank} of {engine.world_size} on {engine.num_nodes}: {module.epochs}\\n", end="", flush=True)
"""


def run(commands: list[str]) -> set[str]:
    """Runs shell commands side by side in the root of the repository; what the ranks have printed."""
    finished = run_command(["bash", "-c", " & ".join([*commands, "wait"])], timeout_s=120, cwd=ROOT)
    assert finished.returncode == 0, finished.output
    return lines(finished.output)


def lines(output):
    return {line for line in output.splitlines() if line.startswith("rank ")}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "job.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    return f"{sys.executable} {tmp_path / 'job.py'}"


def expected(num_nodes):
    batches = {rank: [[*range(rank, 8, 2)], [*range(8 + rank, 16, 2)]] for rank in (0, 1)}
    return {f"rank {rank} of 2 on {num_nodes}: {[batches[rank]]}" for rank in batches}


def test_a_process_for_each_pod(script):
    script = " ".join(warmed(script.split()))
    meeting = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} WORLD_SIZE=2"
    assert run([f"{meeting} RANK={rank} {script}" for rank in (0, 1)]) == expected(num_nodes=2)


@pytest.mark.nightly
def test_mpirun(script):
    if shutil.which("mpirun"):
        commands = [f"mpirun --allow-run-as-root --oversubscribe -np 2 {script}"]
    else:  # what it sets
        names = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=job"
        ranks = "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0}"
        commands = [f"{names} {ranks.format(rank)} {script}" for rank in (0, 1)]
    assert run(commands) == expected(num_nodes=1)


@pytest.mark.nightly
def test_two_machines_that_know_their_own_name_as_an_address_of_loopback(script, tmp_path):
    # As Debian's installer writes it: gloo took that address, and told it to the other machine.
    outputs = [tmp_path / f"output{rank}" for rank in (0, 1)]
    with Namespaces() as machines:
        ranks = []
        for rank, output in enumerate(outputs):
            hosts = tmp_path / f"hosts{rank}"
            hosts.write_text(f"127.0.1.1 node{rank}\n{machines.addresses[1 - rank]} node{1 - rank}\n")
            variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "node0", "MASTER_PORT": 29500}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            environment.pop("GLOO_SOCKET_IFNAME", None)
            here = f"hostname node{rank} && mount --bind {hosts} /etc/hosts && exec {script}"
            command = ["unshare", "--uts", "--mount", "sh", "-c", here]
            with output.open("wb") as file:
                ranks.append(machines.run(rank, command, environment, file))
        for process in ranks:
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                break
    assert [process.returncode for process in ranks] == [0, 0], [output.read_text() for output in outputs]
    assert set().union(*(lines(output.read_text()) for output in outputs)) == expected(num_nodes=2)
