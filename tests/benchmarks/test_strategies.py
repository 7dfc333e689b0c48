"""What each strategy holds is what its formula says."""

import re
import sys

import pytest

from tests.distributed import ROOT, run_command


@pytest.mark.nightly
def test_memory_is_that_of_the_formulas(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "strategies.py", "--size", "tiny", "--output", tmp_path]
    finished = run_command(command, timeout_s=400)
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "strategies-cpu.md").read_text()
    found = re.findall(r"^\| ([^|]+) \|.*\| ([+-][\d.]+)% \|", report, re.MULTILINE)
    assert {
        "ddp",
        "zero1",
        "fsdp",
        "hsdp:replicate=2,shard=2",
        "tp",
        "fsdp+tp:tp=2",
        "cp",
        "fsdp+cp:cp=2",
        "pp:pipeline_size=2",
        "Muon for the matrices of the blocks",
        "EMA of the weights",
        "LoRA of rank 8",
    } <= dict(found).keys()
    assert all(abs(float(percent)) < 5 for _, percent in found), found
