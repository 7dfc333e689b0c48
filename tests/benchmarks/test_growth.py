"""What a rank asks the job's store for does not grow with the ranks; and the benchmark of growth runs to its end."""

import sys

import pytest

from tests.distributed import ROOT, run_command


@pytest.fixture
def store_load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _store_load

    return _store_load


def test_what_a_rank_asks_the_store_for_in_a_second_does_not_grow_with_the_ranks(store_load):
    few, many = (store_load.loads(num_ranks, num_driven=8) for num_ranks in (700, 1400))
    for what, load in few.items():
        assert 1 <= load.keys <= 50, what
        assert many[what].keys <= 1.05 * load.keys, what
        assert many[what].calls <= 1.05 * load.calls, what
    steady = [load.keys for what, load in many.items() if "a step" in what]
    assert max(steady) <= 25, (
        "a beat, a failure, a request of stacks, whether the run stops, eight beats of others twice"
    )


@pytest.mark.nightly
def test_the_report_has_every_table(tmp_path):
    arguments = ["--layers", "3", "--ranks", "3", "--tensors", "20", "--mib", "1", "--old", "3", "--store-ranks", "32"]
    command = [sys.executable, ROOT / "benchmarks" / "growth.py", *arguments, "--rounds", "1", "--output", tmp_path]
    finished = run_command(command, timeout_s=300)
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "growth-cpu.md").read_text()
    for text in (
        "| 3 | 2 | ddp |",
        "| 3 | 3 | fsdp |",
        "| Engine, in the background |",
        "| `dcp.async_save` |",
        "## 60 small tensors",
        "| 3 |",
        "| 32 | a step takes longer |",
    ):
        assert text in report, text
    assert str(tmp_path) not in report
