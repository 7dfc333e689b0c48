"""Two hosts that are cut off from each other without a word: each names the other, and all ranks end."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.hosts import Hosts
from tests.chaos.storm import JOB

pytestmark = pytest.mark.timeout(150)


def wait_for(condition, timeout_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_silent_cut_ends_the_ranks_on_both_sides(tmp_path):
    with Hosts() as hosts:
        for host in (0, 1):
            meeting = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
            flags = json.dumps({"hang_timeout_s": 10})
            words = [sys.executable, str(JOB), str(tmp_path), "ddp", "10000", "1", "0.1", "0.1", flags]
            hosts.start(host, words, tmp_path / f"log{host}.txt", {**meeting, "RANK": str(host), "WORLD_SIZE": "2"})
        wait_for(lambda: sum(path.stat().st_size > 200 for path in tmp_path.glob("start-*")) == 2, 90)
        hosts.cut()
        seconds = wait_for(lambda: not hosts.ranks(0) + hosts.ranks(1), 30)
    logs = [Path(tmp_path / f"log{host}.txt").read_text() for host in (0, 1)]
    print(f"ended {seconds:.1f} s after the cut")
    reports = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert {each["written_by"]["host"] for each in reports} == {"node0", "node1"}, logs
    for report in reports:
        other = {"node0": "host node1 (rank 1)", "node1": "host node0 (rank 0)"}[report["written_by"]["host"]]
        assert report["message"].startswith(f"the connection to {other} is lost: ")
        assert "the culprit is unknown: that host, or the network between" in report["message"]
        assert (report["first_failing_rank"], report["kind"]) == (None, "lost host")
    assert "without an error message" not in "".join(logs)  # nobody's process has ended, as far as is known
