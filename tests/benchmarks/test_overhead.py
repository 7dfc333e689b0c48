"""The benchmark runs to its end and reports every case; its figures are for machines with nothing else to do."""

import sys

from tests.distributed import ROOT, run_command


def test_the_report_has_every_case_and_contestant(tmp_path):
    script = ROOT / "benchmarks" / "overhead.py"
    finished = run_command([sys.executable, script, "--rounds", "1", "--steps", "5", "--output", tmp_path])
    assert finished.returncode == 0, finished.output
    report = (tmp_path / "overhead-cpu.md").read_text()
    assert report in finished.output
    for row in (
        "| no logging |",
        "| one logged value |",
        "| five logged values, two on the bar |",
        "| TensorBoard, progress bar, checkpoint |",
        "| accumulation of 4 |",
        "| validation, one logged value |",
        "| Trainer.fit to first training_step |",
        "| by hand |",
        "| Engine |",
    ):
        assert row in report
    assert "    python benchmarks/overhead.py --rounds 1 --steps 5" in report
