"""What the benchmark beside `Doctor`'s makes of the words of other tools: of their own output."""

import sys
import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader

from tests.distributed import ROOT


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import doctor_beside

    yield doctor_beside
    for name in [name for name in sys.modules if name.startswith(("_doctor", "doctor_beside"))] + ["report"]:
        sys.modules.pop(name, None)


class Hooks(Callback):
    def __init__(self, sleep_s):
        self.sleep_s = sleep_s

    def on_train_batch_end(self, *_):
        time.sleep(self.sleep_s)


def profile(folder, *, loader_s=0.0, callback_s=0.0):
    """The profiler's report of a stock run that sleeps in its loader or in a callback."""

    def collate(rows):
        time.sleep(loader_s)
        return torch.stack(rows)

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Hooks(callback_s)],
        profiler=SimpleProfiler(dirpath=folder, filename="profile", extended=True),
    )
    trainer.fit(BoringModel(), DataLoader(torch.rand(8, 32), batch_size=2, collate_fn=collate))
    return (folder / "fit-profile.txt").read_text()  # of several ranks, each has its number in the name


def test_the_place_of_a_fault_is_read_from_the_profiler_of_each_rank(beside, tmp_path):
    slow = profile(tmp_path / "slow", loader_s=0.2)
    other = profile(tmp_path / "other")
    verdict = beside.profiler_verdict([other, slow], beside.trial_of("slow_loader", 4))
    assert verdict.says.startswith("rank 0: ")
    assert "; rank 1: [_TrainingEpochLoop].train_dataloader_next " in verdict.says
    assert (verdict.cause, verdict.rank) == ("yes", "if its files are compared")
    at_wrong_rank = beside.profiler_verdict([slow, other], beside.trial_of("slow_loader", 4))
    assert at_wrong_rank.rank == "no"


def test_rows_that_enclose_others_are_no_answer(beside, tmp_path):
    report = profile(tmp_path, callback_s=0.2)
    assert "run_training_epoch" in report
    verdict = beside.profiler_verdict([report, report], beside.trial_of("healthy", 4))
    assert "run_training" not in verdict.says
    assert verdict.says.count("Hooks.on_train_batch_end") == 2
    assert verdict.cause == "-"


TRACEML = {
    "primary_diagnosis": {
        "kind": "STRAGGLER",
        "status": "STRAGGLER",
        "severity": "warn",
        "summary": "r0 spent 38.3 ms in Backward, compared with 21.7 ms on r1; cause not measured.",
    },
    "step_time": {"diagnosis": {"kind": "STRAGGLER", "ranks": [1]}},
    "text": """\
|  run · 2/2 ranks · CPU only (no GPU detected) · 1/1 node · 30 common steps · 1m 43s                              |
|  Verdict: STRAGGLER  (WARNING)                                                                                   |
|  Why: R1/N0 was the straggler; R0/N0 spent 16.6 ms longer in Backward waiting at synchronization.                |
|  Next: Inspect synchronization, collectives, and unattributed work around r1.                                    |
""",
}
"""Of a final_summary.json of TraceML 0.5.0, on a busy machine: what is read of it."""


@pytest.mark.parametrize(
    ("kind", "cause", "rank"),
    [
        ("slow_callback", "in part", "yes"),
        ("slow_logger", "in part", "no"),
        ("slow_loader", "no", "yes"),
        ("slow_validation", "no", "-"),
        ("healthy", "no", "-"),
    ],
)
def test_the_verdict_of_traceml_is_read_from_its_summary(beside, kind, cause, rank):
    verdict = beside.traceml_verdict(TRACEML, beside.trial_of(kind, 30))
    assert verdict.says.startswith("STRAGGLER (warn): R1/N0 was the straggler; R0/N0 spent 16.6 ms longer")
    assert verdict.says.endswith("synchronization.")
    assert (verdict.cause, verdict.rank) == (cause, rank)


def test_the_report_counts_by_tool(beside):
    yes, no = beside.Verdict(says="a|b", cause="yes", rank="yes"), beside.Verdict(says="c", cause="no", rank="no")
    healthy = beside.Verdict(says="no finding", cause="yes")
    verdicts = {("slow_loader", "Doctor"): yes, ("slow_loader", "TraceML"): no, ("healthy", "Doctor"): healthy}
    totals, each = beside.tables(verdicts)
    assert [list(row.values()) for row in totals.rows] == [
        ["Doctor", "1", "1", "0", "1", "1", "0", "yes"],
        ["TraceML", "1", "0", "0", "1", "0", "0", "-"],
    ]
    assert "| slow_loader at rank 1 | Doctor | a/b | yes | yes |" in str(each)
