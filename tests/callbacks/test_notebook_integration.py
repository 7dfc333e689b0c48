"""What the cells of a notebook put out, in a real kernel."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.distributed import run_command

JOB = Path(__file__).parent / "notebook_job.py"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [pytest.param("single", 1, marks=pytest.mark.nightly), ("ddp_notebook", 2)]
)
def test_a_cell_has_the_table_of_layers_one_bar_and_short_errors(strategy, num_ranks):
    finished = run_command([sys.executable, JOB, strategy, str(num_ranks)], timeout_s=200)
    assert finished.returncode == 0, finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("OUTPUTS ")]
    fit, test, wrong = json.loads(line.removeprefix("OUTPUTS "))
    layers, total, bar = displayed(fit)
    assert "Linear" in layers
    assert total.startswith("5 parameters, 5 trainable")
    assert "from fork" not in finished.output
    rows = bar.splitlines()
    assert len(rows) == 3, rows
    for epoch, row in enumerate(rows, start=1):
        assert re.fullmatch(rf"epoch {epoch}/3  [\d.]+ s  train/loss \S+  val/loss \S+\*?", row)
    assert "*" in rows[0]
    printed = "".join(output["text"] for output in fit if output.get("name") == "stdout")
    ranks = sorted(line for line in printed.splitlines() if line.startswith("rank "))
    assert ranks == sorted(f"rank {rank} prints" for rank in range(num_ranks) for _ in range(3))
    assert len(re.findall(r"^polyphase \d", printed, re.MULTILINE)) == 1, "the run's own line"
    bar, table = displayed(test)
    assert re.fullmatch(r"Testing  ━{40}  300/300  .*", bar)
    assert table.count("test/loss") == 1
    num_lines = sum(output["text"].count("\n") for output in fit if output["output_type"] == "stream")
    assert num_lines < 30
    (error,) = [output for output in wrong if output["output_type"] == "error"]
    assert error["ename"] == ("RuntimeError" if strategy == "single" else "ProcessRaisedException")
    assert 10 < len(error["traceback"]) < 25, error["traceback"]
    assert "in test_step" in "".join(error["traceback"])


def displayed(outputs):
    return [output["data"]["text/plain"] for output in outputs if output["output_type"] == "display_data"]
