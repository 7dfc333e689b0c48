"""Rules about what happens between steps: callbacks, loggers, checkpoints, validation."""

import pytest

from polyphase.doctor import judge
from tests.doctor.runs import changed, interval, only, run_of


def test_slow_callback_of_one_rank_is_named():
    slow = changed(interval(callbacks=5.0), by_hook={"Draws.on_train_batch_end": 0.4, "Draws.on_before_backward": 0.1})
    finding = only(run_of(slow, interval(waiting=5.2)))
    assert (finding.cause, finding.ranks) == ("slow_callback", (0,))
    assert "Draws.on_train_batch_end takes 4 ms a step" in finding.evidence
    assert finding.gain == pytest.approx(1 / 3, abs=0.01)


def test_a_hook_of_the_users_is_named_with_its_line():
    slow = changed(interval(callbacks=5.0), by_hook={"Draws.on_train_batch_end": 0.4})
    finding = only(run_of(slow, slow, hooks={"Draws.on_train_batch_end": "train.py:41"}))
    assert finding.evidence.startswith("Draws.on_train_batch_end (train.py:41) takes 4 ms a step")


def test_slow_callback_of_all_is_no_ranks():
    slow = changed(interval(callbacks=5.0), by_hook={"Draws.on_train_batch_end": 0.5})
    assert only(run_of(slow, slow)).ranks == ()


def test_a_hook_that_is_hidden_behind_the_device_is_not_slow():
    hidden = changed(interval(callbacks=0.1), by_hook={"Draws.on_train_batch_end": 0.5})
    assert judge(run_of(hidden, device="cuda")).findings == []


def test_the_doctor_does_not_name_itself():
    notes = changed(interval(callbacks=5.0), by_hook={"Doctor.on_train_batch_end": 0.5})
    assert "slow_callback" not in {finding.cause for finding in judge(run_of(notes, notes)).findings}


def test_slow_logging_names_the_loggers():
    finding = only(run_of(interval(logging=3.0), interval(waiting=3.2), loggers=["WandbLogger"]))
    assert (finding.cause, finding.ranks) == ("slow_logging", (0,))
    assert "WandbLogger" in finding.evidence


def test_checkpoint_stall():
    stalled = changed(interval(checkpoint=5.0), num_saves=5)
    finding = only(run_of(stalled, stalled))
    assert (finding.cause, finding.ranks) == ("checkpoint_stall", ())
    assert "5 saves stop training for 0.1 s each" in finding.evidence
    assert "Snapshot()" in finding.remedy


def test_the_time_of_a_checkpoint_callback_is_the_checkpoints():
    stalled = changed(interval(callbacks=5.0), num_saves=5, by_hook={"ModelCheckpoint.on_train_batch_end": 0.5})
    assert only(run_of(stalled, stalled)).cause == "checkpoint_stall"


def test_one_save_at_the_end_is_no_finding():
    assert judge(run_of(changed(interval(checkpoint=5.0), num_saves=1))).findings == []


def test_slow_validation():
    assert only(run_of(*[interval(validation=6.0)] * 2)).cause == "slow_validation"
