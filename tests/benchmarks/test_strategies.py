"""What each strategy holds is what its formula says."""

import re
import sys

import pytest

from tests.distributed import ROOT, run_command


@pytest.mark.nightly
def test_memory_is_that_of_the_formulas(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "strategies.py", "--size", "tiny", "--output", tmp_path]
    finished = run_command(command, timeout_s=200)
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "strategies-cpu.md").read_text()
    found = dict(re.findall(r"^\| (\S+) \|.*\| ([+-][\d.]+)% \|", report, re.MULTILINE))
    assert {
        "ddp",
        "zero1",
        "fsdp",
        "hsdp:replicate=2,shard=2",
        "tp",
        "fsdp+tp:tp=2",
        "pp:pipeline_size=2",
    } <= found.keys()
    assert all(abs(float(percent)) < 5 for percent in found.values()), found
