"""Every line of the GPU suite, in small: what a GPU alone has says so, and all else passes."""

import json
import sys

import pytest

from benchmarks.gpu.suite import ITEMS
from tests.distributed import ROOT, run_command

pytestmark = pytest.mark.timeout(900, func_only=True)  # 40 processes; to compile the device takes a minute

NEEDS_CUDA = {
    "cuda_graphs": "needs CUDA: CUDA graphs",
    **{
        item.name: "needs CUDA: Lightning's DDPStrategy makes a stream of torch.cuda on any accelerator"
        for item in ITEMS
        if item.name.endswith(" ddp Trainer")
    },
}


@pytest.mark.nightly
def test_the_suite_passes_but_for_what_needs_cuda(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--accelerator", "sim", "--smoke", "--output", tmp_path]
    finished = run_command(command, timeout_s=800, cwd=ROOT)
    records = json.loads((tmp_path / "gpu-simulated.json").read_text())
    bad = {name: record for name, record in records.items() if record["status"] != "ok" and name not in NEEDS_CUDA}
    assert not bad, finished.output
    assert records.keys() == {item.name for item in ITEMS}
    assert {name: records[name]["reason"] for name in NEEDS_CUDA} == NEEDS_CUDA
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "gpu-simulated.md").read_text()
    for text in (
        "# GPU suite",
        "| strategies |",
        "| 124M | ddp | no | 1 | 32 | by hand |",
        "| 1.3B | pp | no | 1 | 32 | Engine |",
        "| 1.3B | fsdp | yes | 1 | 32 | by hand selective |",
    ):
        assert text in report
