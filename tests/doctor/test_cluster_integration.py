"""`polyphase doctor host` in all processes of a job: rank 0 says what all hosts found, and what is between them."""

import json
import sys

from tests.distributed import ROOT, free_port, run_command


def test_all_processes_of_a_job(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}"]
    finished = run_command([*command, "-m", "polyphase.engine", "doctor", "host", tmp_path, "--json"], timeout_s=100)
    assert finished.returncode == 0, finished.output
    text = finished.output
    checks = json.loads(text[text.index("[\n") : text.rindex("]") + 1])
    names = [check["name"].rpartition(": ")[2] for check in checks]
    assert names.count("disk") == 1, "a rank of each host checks it"
    found = dict(zip(names, checks, strict=True))
    assert found["meeting"]["found"].startswith("3 ranks on 1 hosts, after ")
    assert found["clocks"]["status"] == found["same versions"]["status"] == "ok"
    assert "MB/s between ranks, at least" in found["links"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_come_are_an_error(tmp_path, monkeypatch):
    code = f"""
import os, sys
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
sys.path.insert(0, {str(ROOT)!r})
from polyphase.doctor import host
host._PATIENCE_S = 2.0
check, = host.check_cluster(".")
print(check.name, check.status, check.found)
"""
    finished = run_command([sys.executable, "-c", code], timeout_s=60)
    assert finished.returncode == 0, finished.output
    assert "meeting fail 2 ranks did not meet: " in finished.output
