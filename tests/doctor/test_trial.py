"""`polyphase doctor fit`: which flags mend what, and what is refused before anything runs."""

import pytest

from polyphase.doctor import Run
from polyphase.doctor.figures import figures_of
from polyphase.doctor.rules import Finding
from polyphase.doctor.trial import Trial, remedy_of
from polyphase.engine.cli import main

from .runs import info, interval

FIT = ["--model", "DigitsClassifier", "--data", "Digits"]


def remedy(cause, ranks=(), **told):
    both = {0: info(0), 1: info(1)}
    for each in both.values():
        for name, value in told.items():
            setattr(each, name, value)
    figures = figures_of(Run(both, {0: [interval()], 1: [interval()]}))
    finding = Finding(cause=cause, ranks=ranks, evidence="", numbers={}, remedy="", gain=0.5)
    found = remedy_of(finding, figures)
    return None if found is None else str(found)


def test_flags_that_mend_a_cause():
    assert remedy("slow_loader", num_workers=0, num_cpus=8.0, local_ranks=2) == "--data.num_workers=3"
    assert remedy("slow_loader", num_workers=2) == "--data.num_workers=4"
    assert remedy("exposed_communication", strategy="ddp") == "--compression=bf16"
    assert remedy("exposed_communication", strategy="fsdp+tp") == "--precision=bf16-mixed"
    assert remedy("exposed_communication", strategy="ddp+cp") is None
    assert remedy("slow_logging") == "--log_every_n_steps=50"
    assert remedy("thread_oversubscription", num_cpus=8.0, local_ranks=4) == "OMP_NUM_THREADS=2"


def test_causes_that_no_flag_mends():
    assert remedy("slow_loader", ranks=(1,), num_workers=0) is None, "the others' loaders are not slow"
    assert remedy("slow_loader", num_workers=None) is None, "not torch's"
    assert remedy("exposed_communication", strategy="ddp", compression="int8") is None
    assert remedy("exposed_communication", strategy="pp") is None
    assert remedy("slow_callback") is None


def test_a_trial_says_forecast_and_measured():
    finding = Finding(cause="slow_logging", evidence="", numbers={}, remedy="", gain=0.5)
    trial = Trial(finding, None, before_s=0.2, after_s=0.15)
    assert trial.gain == pytest.approx(0.25)
    assert trial.plain()["forecast"] == 0.5
    assert Trial(finding, None, before_s=0.2).gain is None


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--steps", "soon", *FIT], "--steps must be a whole number, but got 'soon'"),
        (["--steps=5", *FIT], "--steps must be at least 14, of which the first ones are not judged, but got 5"),
        ([*FIT, "--max_steps=9"], "doctor fit decides for how long it runs and where it writes: leave out --max_steps"),
        ([*FIT, "--trainer.default_root_dir", "x"], "leave out --default_root_dir"),
        ([*FIT, "--strategy", "dpp"], "ddp"),
        (["--devices=1"], "fit needs a model"),
    ],
)
def test_what_is_refused(words, match, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["polyphase", "doctor", "fit", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


def test_a_job_of_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["polyphase", "doctor", "fit", *FIT])
    with pytest.raises(SystemExit):
        main()
    assert "doctor fit starts the processes itself" in capsys.readouterr().err
