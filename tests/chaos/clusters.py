"""What becomes of a job on two hosts when one of them, or the network between them, fails.

    python -m tests.chaos.clusters --only "cut, for good"

Each case starts the job of `job.py` on two emulated hosts (`Hosts`), disturbs them while it trains, and has it end, if
need be by starting it again. Times are from the disturbance to the first report of each host. Needs root.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .hosts import Hosts
from .job import BATCH
from .storm import JOB, judge, steps_since, times_of, undisturbed

__all__ = ["CASES", "SAME", "Case", "Result", "run"]

SIZES = (320, 1)
"""Samples and epochs; 80 steps of two ranks."""
PAUSE_S = 0.2
LIMIT_S = 240.0
SAME = 1e-5
"""The largest difference of weights of 32 bits that comes from the order of sums."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "clusters-cpu.md"


@dataclass(kw_only=True)
class Case:
    """A disturbance.

    Args:
        disturb: what happens while the job trains; None: nothing.
        strategy: of the engine.
        elastic: `polyphase launch --nnodes 1:2` starts the processes; else one command a host does.
        mend_after_s: when the cable is mended, if the job outlives that.
        restarts: which hosts are started again once the disturbance has been noticed.
        rate: of the cable, as `tc` writes it.
        nameless: the hosts know each other and themselves by no name.
        continues: with ``on_rank_loss="continue"``, by `polyphase launch --nnodes 2`; else the job stops.
        mend: undoes the disturbance.
        keeps: nobody may be lost.
    """

    disturb: Callable[[Hosts], None] | None = None
    strategy: str = "ddp"
    elastic: bool = False
    mend_after_s: float | None = None
    restarts: tuple[int, ...] = ()
    rate: str | None = None
    nameless: bool = False
    continues: bool = False
    mend: Callable[[Hosts], None] = Hosts.mend
    keeps: bool = False


def _freeze(hosts: Hosts) -> None:
    hosts.cut()
    hosts.suspend(1)


def _thaw(hosts: Hosts) -> None:
    hosts.mend()
    hosts.resume(1)


CASES = {
    "cut, for good": Case(disturb=Hosts.cut, restarts=(0, 1)),
    "cut, for good; fsdp": Case(disturb=Hosts.cut, strategy="fsdp", restarts=(0, 1)),
    "cut for 20 s": Case(disturb=Hosts.cut, mend_after_s=20.0),
    "processes of node1 killed": Case(disturb=lambda hosts: hosts.kill(1), restarts=(0, 1)),
    "processes of node0 killed": Case(disturb=lambda hosts: hosts.kill(0), restarts=(0, 1)),
    "power-off of node0": Case(disturb=lambda hosts: hosts.power_off(0), restarts=(0, 1)),
    "power-off of node1, elastic, which returns": Case(
        disturb=lambda hosts: hosts.power_off(1), elastic=True, restarts=(1,)
    ),
    "power-off of node0, elastic": Case(disturb=lambda hosts: hosts.power_off(0), elastic=True, restarts=(0, 1)),
    "5 Mbit/s": Case(rate="5mbit"),
    "names that nobody can resolve": Case(nameless=True),
    "continue: rank of node1 killed": Case(disturb=lambda hosts: hosts.ranks(1)[0].kill(), continues=True),
    "continue: power-off of node1": Case(disturb=lambda hosts: hosts.power_off(1), continues=True),
    "continue: power-off of node0": Case(disturb=lambda hosts: hosts.power_off(0), continues=True, restarts=(0, 1)),
    "continue: cut, for good": Case(disturb=Hosts.cut, continues=True),
    "continue: cut for 20 s": Case(disturb=Hosts.cut, continues=True, mend_after_s=20.0, keeps=True),
    "continue: cut for 40 s": Case(disturb=Hosts.cut, continues=True, mend_after_s=40.0),
    "continue: node1 frozen and cut for 40 s": Case(disturb=_freeze, mend=_thaw, continues=True, mend_after_s=40.0),
    "continue: rank of node1 stopped for 15 s": Case(
        disturb=lambda hosts: hosts.ranks(1)[0].suspend(),
        mend=lambda hosts: hosts.resume(1),
        continues=True,
        mend_after_s=15.0,
        keeps=True,
    ),
    "continue: rank of node1 stopped for 80 s": Case(
        disturb=lambda hosts: hosts.ranks(1)[0].suspend(),
        mend=lambda hosts: hosts.resume(1),
        continues=True,
        mend_after_s=80.0,
    ),
    "continue: 5 Mbit/s": Case(rate="5mbit", continues=True, keeps=True),
}


@dataclass
class Result:
    """What has become of a job."""

    ended: bool = False
    noticed_s: dict[str, float] = field(default_factory=dict)
    """By host, seconds until its first report."""
    said: dict[str, str] = field(default_factory=dict)
    goes_on_s: float | None = None
    """Seconds until a step after the disturbance, where no host had to be started again."""
    launcher_ended_s: float | None = None
    """Seconds until `polyphase launch` has ended, where the host of the rendezvous was lost."""
    lost: int | None = None
    repeated: int | None = None
    difference: float = 0.0
    """Of weights from those of a run that nobody has disturbed."""
    broken: str = ""
    """A promise of `on_rank_loss="continue"` that was not kept."""

    def row(self, name: str) -> str:
        noticed = ", ".join(f"{host} {seconds:.0f}" for host, seconds in sorted(self.noticed_s.items())) or "-"
        said = "<br>".join(f"{host}: {text}" for host, text in sorted(self.said.items())) or "-"
        if self.launcher_ended_s is not None:
            said += f"<br>`polyphase launch` has ended after {self.launcher_ended_s:.0f} s"
        on = "-" if self.goes_on_s is None else f"{self.goes_on_s:.0f}"
        return f"| {name} | {noticed} | {said} | {on} | {self.lost} | {self.repeated} |"


def run(case: Case, folder: Path) -> Result:
    """Runs a case in an empty folder.

    Raises:
        TimeoutError: the job did not get on.
    """
    calm, job, result = folder / "calm", folder / "job", Result()
    flags = {"global_batch_size": 2 * BATCH} if case.continues else {}
    undisturbed(calm, case.strategy, *SIZES, dropout=0.0, flags=flags)
    job.mkdir()
    with Hosts(case.rate) as hosts:
        for host in (0, 1):
            _start(hosts, host, case, job)
        _wait(lambda: steps_since(job, 0.0) and _num_lines(job) > 10, job)
        if case.disturb is not None:
            _disturb(hosts, case, job, result)
        _wait((job / "weights.pt").exists, job)
        _wait(lambda: not hosts.ranks(0) + hosts.ranks(1), job)
        if case.continues:  # launchers wait for no machine that is lost
            _wait(lambda: not hosts.processes(0) + hosts.processes(1), job)
    outcome = judge(job, calm, *SIZES, [])
    result.ended, result.lost, result.repeated = True, outcome.lost, outcome.repeated
    result.difference = outcome.difference
    if case.keeps and any("went on after" in text for text in result.said.values()):
        result.broken = "a rank was lost"
    return result


def _disturb(hosts: Hosts, case: Case, job: Path, result: Result) -> None:
    assert case.disturb is not None
    case.disturb(hosts)
    began = time.time()
    if case.continues and not case.restarts:
        _disturb_one_that_continues(hosts, case, job, result)
        return
    if case.mend_after_s is not None:
        time.sleep(case.mend_after_s)
        hosts.mend()
        _wait(lambda: steps_since(job, began + case.mend_after_s), job)
        result.goes_on_s = time.time() - began
        return
    everyone = {0, 1} if case.restarts == (0, 1) else {0, 1} - set(case.restarts)
    if case.elastic and case.restarts == (0, 1):  # without the host of the rendezvous
        _wait(lambda: not hosts.processes(1), job)
        result.launcher_ended_s = time.time() - began
    elif case.elastic:
        _wait(lambda: steps_since(job, began + 2.0), job)  # what was under way has come by then
        result.goes_on_s = time.time() - began
    else:
        _wait(lambda: not any(hosts.ranks(host) for host in everyone), job)
    for path in sorted((job / "failures").glob("*.json"), key=lambda path: path.stat().st_mtime):
        report = json.loads(path.read_text())
        host = report["written_by"]["host"]
        result.noticed_s.setdefault(host, path.stat().st_mtime - began)
        result.said.setdefault(host, report["message"].partition("; the culprit")[0])
    hosts.mend()
    for host in case.restarts:
        hosts.kill(host)  # a launcher that waits for the other host
    for host in case.restarts:
        _start(hosts, host, case, job)


def _disturb_one_that_continues(hosts: Hosts, case: Case, job: Path, result: Result) -> None:
    """Waits for the steps that follow; ranks that return have to end, and to leave all files alone."""
    began = time.time()
    time.sleep(case.mend_after_s or 0.0)
    old = {path: path.read_text().count("\n") for path in job.glob("start-*-1.txt")}
    if case.mend_after_s is not None:
        case.mend(hosts)
    _wait(lambda: steps_since(job, began + max(2.0, case.mend_after_s or 0.0)), job)
    result.goes_on_s = min(time_s for time_s in times_of(job) if time_s > began + 2.0) - began
    if not case.keeps:
        _wait(lambda: not hosts.processes(1), job)
        if any(path.read_text().count("\n") > before + 1 for path, before in old.items()):  # one: it wakes in a step
            result.broken = "a lost rank went on"
    for host in (0, 1):
        lines = (job / f"log{host}.txt").read_text(errors="replace").splitlines()
        said = [line for line in lines if any(words in line for words in _TELLING)]
        result.said.update({f"node{host}": said[-1].partition("; the culprit")[0]} if said else {})


_TELLING = ("went on after", "gone on without it", "the connection to host", "its process has ended")
"""What the log of a host that was disturbed says of it."""


def _start(hosts: Hosts, host: int, case: Case, job: Path) -> None:
    command = [str(JOB), str(job), case.strategy, *map(str, (*SIZES, PAUSE_S, 0.0)), "{}"]
    log, address = job / f"log{host}.txt", hosts.addresses[0]
    if case.elastic:
        conf = f"is_host={'true' if host == 0 else 'false'}"
        launcher = ["-m", "polyphase.engine", "launch", "--nnodes=1:2", "--nproc=1", "--rdzv-backend=c10d"]
        launcher += [f"--rdzv-endpoint={address}:29400", f"--rdzv-conf={conf}", f"--local-addr={hosts.addresses[host]}"]
        hosts.start(host, [sys.executable, *launcher, "--", *command], log)
        return
    if case.continues:
        flags = json.dumps({"on_rank_loss": "continue", "global_batch_size": 2 * BATCH})
        launcher = ["-m", "polyphase.engine", "launch", "--nnodes=2", f"--node-rank={host}", "--nproc=1"]
        launcher += [f"--master-addr={address}", "--master-port=29500"]
        env = {"POLYPHASE_JOB_SECRET": "of this job"}
        hosts.start(host, [sys.executable, *launcher, "--", *command[:-1], flags], log, env)
        return
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "RANK": str(host), "WORLD_SIZE": "2"}
    hosts.start(host, [sys.executable, *command], log, meeting, nameless=case.nameless)


def _num_lines(job: Path) -> int:
    return sum(path.read_text().count("\n") for path in job.glob("start-*"))


def _wait(condition: Callable[[], bool], job: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(job.glob("log*.txt")))
            raise TimeoutError(f"the job did not get on within {LIMIT_S:.0f} s:\n{logs}")
        time.sleep(0.1)


HEADER = """\
# Two hosts, and what fails between them

{date}, {cores} cores, Python {python}, torch {torch}

    make clusters

Two emulated hosts of one CPU rank each, on one machine: network namespaces with their own names and process numbers. A
host that is cut off can't know whether the other one, or the network, has failed: it names the host at the other end.
"Goes on": seconds until the next step after the failure, where nobody had to start the job again; else it was started
again on both hosts. Samples are those of the epoch that no step, or more than one, was trained on in the end.

| case | noticed after (s) | the reports say | goes on after (s) | samples lost | repeated |
| --- | --- | --- | --- | --- | --- |
"""


def _header() -> str:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return HEADER.format(cores=os.cpu_count(), date=time.strftime("%Y-%m-%d"), **versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--output", type=Path, default=None, help="of the table; by default the results' file, of all cases"
    )
    options = parser.parse_args()
    rows, failed = [], False
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = run(CASES[name], Path(folder))
            except TimeoutError as error:
                print(f"{name}: {error}", file=sys.stderr)
                result = Result()
        rows.append(result.row(name))
        print(rows[-1], flush=True)
        if result.broken or result.difference > SAME:
            print(f"{name}: {result.broken or 'other weights'}, {result.difference:.0e}", file=sys.stderr)
        failed |= not result.ended or bool(result.lost or result.repeated or result.broken)
        failed |= result.difference > SAME
    table = _header() + "\n".join(rows) + "\n"
    if options.output or options.only == list(CASES):
        (options.output or RESULTS).write_text(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
