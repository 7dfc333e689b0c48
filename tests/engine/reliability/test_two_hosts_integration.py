"""Two hosts that are cut off from each other without a word: each names the other, and all ranks end."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tests.chaos import job
from tests.chaos.hosts import Hosts, enter

pytestmark = pytest.mark.timeout(150)


def wait_for(condition, timeout_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.1)
    return time.monotonic() - began


def _trains(number: int, hosts: Hosts, folder: Path) -> None:
    """What runs on a host: a rank, which takes its name and its place in the network from there."""
    enter(hosts.names[number], f"node{number}")
    meeting = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
    os.environ.update(meeting, RANK=str(number), WORLD_SIZE="2")
    job.main(folder, "ddp", 10_000, 1, 0.1, flags={"hang_timeout_s": 10})


def test_a_silent_cut_ends_the_ranks_on_both_sides(tmp_path, capfd):
    context = multiprocessing.get_context("fork")  # make clusters has hosts whose interpreters are their own
    with Hosts() as hosts:
        ranks = [context.Process(target=_trains, args=(number, hosts, tmp_path)) for number in (0, 1)]
        for rank in ranks:
            rank.start()
        wait_for(lambda: sum(path.stat().st_size > 200 for path in tmp_path.glob("start-*")) == 2, 90)
        hosts.cut()
        seconds = wait_for(lambda: not any(rank.is_alive() for rank in ranks), 30)
    said = "".join(capfd.readouterr())
    print(f"ended {seconds:.1f} s after the cut")
    reports = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert {each["written_by"]["host"] for each in reports} == {"node0", "node1"}, said
    for report in reports:
        other = {"node0": "host node1 (rank 1)", "node1": "host node0 (rank 0)"}[report["written_by"]["host"]]
        assert report["message"].startswith(f"the connection to {other} is lost: ")
        assert "the culprit is unknown: that host, or the network between" in report["message"]
        assert (report["first_failing_rank"], report["kind"]) == (None, "lost host")
    assert "without an error message" not in said  # nobody's process has ended, as far as is known
