"""The job of two ranks under each launcher: it starts, ends by SIGTERM, goes on, ends by SIGKILL, goes on to its end.

    python -m tests.chaos.launchers --only mpirun "one process a pod"

Of a launcher that is "emulated", the variables that it sets are there, and its processes are started one by one. The
outcome is compared with that of a run under torchrun that nobody stopped.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ..distributed import ROOT, free_port
from .storm import JOB, TORCHRUN, judge, steps_since, undisturbed

SIZES = (96, 1)
"""Samples and epochs."""
LIMIT_S = 150.0
RESULTS = ROOT / "benchmarks" / "results" / "launchers-cpu.md"
ARGUMENTS = ("ddp", *map(str, SIZES), "0.15", "0.1")


class Process(NamedTuple):
    """One of those that start a job."""

    words: list[str]
    variables: dict[str, str]


def _job(folder: Path, devices: int | None = None) -> list[str]:
    return [str(JOB), str(folder), *ARGUMENTS, json.dumps({} if devices is None else {"devices": devices})]


def _plain(folder: Path) -> list[Process]:
    return [Process([sys.executable, *_job(folder, 2)], {})]


def _torchrun(*options: str) -> Callable[[Path], list[Process]]:
    def make(folder: Path) -> list[Process]:
        port = free_port()
        words = [*TORCHRUN[:3], "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--monitor-interval=0.5"]
        words += [option.format(port=port) for option in options]
        ranks = [[f"--node-rank={rank}"] if "--master-port={port}" in options else [] for rank in (0, 1)]
        return [Process([*words, *rank, *_job(folder)], {}) for rank in ranks]

    return make


def _trainjob(folder: Path) -> list[Process]:
    meeting = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    meeting["PET_MASTER_PORT"] = str(free_port())
    ranks = [{**meeting, "PET_NODE_RANK": str(rank)} for rank in (0, 1)]
    return [Process([*TORCHRUN[:3], *_job(folder)], variables) for variables in ranks]


def _mpirun(folder: Path) -> list[Process]:
    return [
        Process(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, *_job(folder)], {})
    ]


def _hydra(folder: Path) -> list[Process]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [Process(["mpiexec.hydra", "-n", "2", sys.executable, *_job(folder)], meeting)]


def _srun(folder: Path) -> list[Process]:
    words = ["srun", "--nodes=1", "--ntasks-per-node=2", "--kill-on-bad-exit=1", f"--chdir={ROOT}", sys.executable]
    return [Process([*words, *_job(folder)], {})]


def _variables(text: str) -> Callable[[Path], list[Process]]:
    """Processes of which each has these variables, with its rank for ``{rank}``."""

    def make(folder: Path) -> list[Process]:
        hosts = folder / "hosts"
        hosts.write_text(f"batch\n{socket.gethostname()}\n{socket.gethostname()}\n")
        port, job = free_port(), int(time.time()) % 100_000
        found = []
        for rank in (0, 1):
            words = text.format(rank=rank, port=port, hosts=hosts, job=job, host=socket.gethostname()).split()
            found.append(Process([sys.executable, *_job(folder)], dict(word.split("=", 1) for word in words)))
        return found

    return make


SUBMITIT = """
import sys
from pathlib import Path
import submitit
from tests.chaos.job import main

executor = submitit.AutoExecutor(sys.argv[1] + "/submitit", cluster="local")
executor.update_parameters(tasks_per_node=2, timeout_min=10)
job = executor.submit(main, Path(sys.argv[1]), "ddp", {0}, {1}, 0.15, 0.1)
job.wait()
"""


def _submitit(folder: Path) -> list[Process]:
    return [Process([sys.executable, "-c", SUBMITIT.format(*SIZES), str(folder)], {})]


LAUNCHERS: dict[str, tuple[str, Callable[[Path], list[Process]]]] = {
    "plain `python`": ("real", _plain),
    "torchrun, static": ("real, two agents", _torchrun("--master-addr=127.0.0.1", "--master-port={port}")),
    "torchrun, c10d": (
        "real, two agents",
        _torchrun("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
    ),
    "TrainJob (`PET_*`)": ("real torchrun, emulated variables", _trainjob),
    "one process a pod": (
        "emulated",
        _variables("MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE=2 RANK={rank}"),
    ),
    "SLURM (`srun`)": ("real, a cluster of one node", _srun),
    "SLURM, its variables": (
        "emulated",
        _variables(
            "SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_NODEID=0 SLURM_JOB_ID={job}"
            " SLURM_JOB_NAME=train SLURM_NTASKS_PER_NODE=2 SLURM_NODELIST={host} SLURM_JOB_NODELIST={host}"
        ),
    ),
    "Open MPI (`mpirun`)": ("real", _mpirun),
    "MPICH (`mpiexec.hydra`)": ("real", _hydra),
    "Intel MPI": (
        "emulated",
        _variables(
            "PMI_SIZE=2 PMI_RANK={rank} MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=2 MASTER_ADDR=127.0.0.1"
            " MASTER_PORT={port}"
        ),
    ),
    "LSF (`jsrun`)": (
        "emulated",
        _variables(
            "JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_RANK={rank} JSM_NAMESPACE_LOCAL_RANK={rank} JSM_NAMESPACE_LOCAL_SIZE=2"
            " LSB_JOBID={job} LSB_DJOB_RANKFILE={hosts}"
        ),
    ),
    "submitit, local executor": ("real", _submitit),
}

NEEDED = {
    "Open MPI (`mpirun`)": ("mpirun", "apt install openmpi-bin"),
    "MPICH (`mpiexec.hydra`)": ("mpiexec.hydra", "apt install mpich"),
    "SLURM (`srun`)": ("srun", "apt install slurm-wlm, and start a cluster of this machine"),
}
"""The command of a launcher that is real, and where it comes from."""


class Row(NamedTuple):
    """What became of the job."""

    after_sigterm: bool
    """It ended by itself, and went on."""
    after_sigkill: bool
    lost: int
    repeated: int
    difference: float


def run(name: str, folder: Path, calm: Path) -> Row:
    """Runs the job under a launcher, in an empty folder.

    Raises:
        TimeoutError: it did not get on, or did not end.
    """
    folder.mkdir()
    _start(name, folder, signal.SIGTERM)
    num_stopped = _last_step(folder)
    _start(name, folder, signal.SIGKILL)
    num_killed = _last_step(folder)
    _start(name, folder, None)
    outcome = judge(folder, calm, *SIZES, [])
    return Row(0 < num_stopped < num_killed, num_killed > 0, outcome.lost, outcome.repeated, outcome.difference)


def _start(name: str, folder: Path, number: signal.Signals | None) -> None:
    began = time.time()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack, (folder / "log.txt").open("a") as log:
        stack.callback(_end_all, folder)
        for process in LAUNCHERS[name][1](folder):
            environment = {**variables, **process.variables}
            subprocess.Popen(
                process.words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        if number is not None:
            before = _last_step(folder)
            _wait(lambda: steps_since(folder, began) and _last_step(folder) > before + 4, folder)
            _ranks(folder)[0 if number == signal.SIGTERM else -1].send_signal(number)
        else:
            _wait((folder / "weights.pt").exists, folder)
        _wait(lambda: not _processes(folder), folder)


def _last_step(folder: Path) -> int:
    lines = [path.read_text().splitlines() for path in folder.glob("start-*")]
    return max((int(each[-1].split()[2]) for each in lines if each), default=0)


def _processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status", "pid"]):
        is_there = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if is_there and any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def _ranks(folder: Path) -> list[psutil.Process]:
    def is_rank(words: list[str]) -> bool:
        is_script = str(JOB) in words and "-m" not in words and "python" in Path(words[0]).name
        return is_script or "submitit.core._submit" in words

    return [process for process in _processes(folder) if is_rank(process.info["cmdline"])]


def _end_all(folder: Path) -> None:
    for process in _processes(folder):
        process.kill()


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the job did not get on within {LIMIT_S:.0f} s:\n{(folder / 'log.txt').read_text()[-3000:]}"
            )
        time.sleep(0.2)


HEADER = """\
# Two ranks under each launcher

{date}, {cores} cores, Python {python}, torch {torch}

    python -m tests.chaos.launchers

Each job is stopped by SIGTERM, started again, killed (SIGKILL to one rank), and started again to its end. Samples are
those that no step, or more than one, was trained on in the end. The difference is that of the weights from a run under
torchrun that nobody stopped: 0 is equal to the bit.

| launcher | which is | goes on after SIGTERM | after SIGKILL | samples lost | repeated | max difference |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    options = parser.parse_args()
    for name, (command, remedy) in NEEDED.items():
        if name in options.only and shutil.which(command) is None:
            parser.error(f"there is no {command}: {remedy}, or name the others with --only.")
    rows, has_failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        undisturbed(Path(folder) / "calm", "ddp", *SIZES)
        for number, name in enumerate(options.only):
            try:
                row = run(name, Path(folder) / str(number), Path(folder) / "calm")
            except TimeoutError as error:
                print(f"{name}: {error}", file=sys.stderr)
                row = Row(False, False, -1, -1, float("nan"))
            words = ["yes" if went_on else "no" for went_on in row[:2]]
            rows.append(" | ".join([f"| {name}", LAUNCHERS[name][0], *words, *map(str, row[2:4]), f"{row[4]:g} |"]))
            print(rows[-1], flush=True)
            has_failed |= not all(row[:2]) or row[2:] != (0, 0, 0.0)
    if options.only == list(LAUNCHERS):
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        header = HEADER.format(cores=os.cpu_count(), date=time.strftime("%Y-%m-%d"), **versions)
        RESULTS.write_text(header + "\n".join(rows) + "\n")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
