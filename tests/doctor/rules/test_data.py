"""Rules about data: a loader or a copy that is waited for, and samples that are made up."""

import pytest

from tests.doctor.runs import changed, interval, only, run_of


def test_slow_loader_of_one_rank():
    fast = interval(waiting=20.2)
    finding = only(run_of(fast, fast, interval(data_wait=20.1), fast))
    assert (finding.cause, finding.ranks, finding.host) == ("slow_loader", (2,), "host2")
    assert finding.gain == pytest.approx(2 / 3, abs=0.02)
    assert "num_workers=4" in finding.remedy
    assert "host2" in finding.remedy


def test_slow_loader_of_all():
    finding = only(run_of(interval(data_wait=10.0), interval(data_wait=11.0), num_workers=0))
    assert (finding.cause, finding.ranks) == ("slow_loader", ())
    assert "DataLoader(num_workers=3, persistent_workers=True)" in finding.remedy


def test_slow_copy_says_to_pin_where_there_is_a_device():
    assert "pin_memory=True" in only(run_of(interval(copy=2.0), device="cuda")).remedy
    assert "on_after_batch_transfer" in only(run_of(interval(copy=2.0))).remedy


def test_padding():
    finding = only(run_of(changed(interval(), padding=0.5)))
    assert finding.cause == "padding"
    assert finding.gain == pytest.approx(0.5 * 0.8, abs=0.01)


def test_uneven_data_by_fillers():
    finding = only(run_of(interval(), changed(interval(), num_fillers=20)))
    assert (finding.cause, finding.ranks) == ("uneven_data", (1,))
