"""benchmarks/results/data-cpu.md says what is found, and no kind of training data is silently read otherwise."""

import pytest

from .data_matrix import _EACH, BATCH, KINDS, PAGE, one_process
from .data_ranks import LAUNCHERS, STOPPED, STOPS, rank_row, stop_cell, stop_row


def test_the_page_says_what_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # taken back after the test
    found, written = one_process(tmp_path), PAGE.read_text()
    assert "SILENTLY" not in written
    assert written.startswith(found), "write it anew: python -m tests.docs.data_matrix"


@pytest.mark.timeout(240)
def test_so_it_is_with_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    kind = "`IterableDataset` with shards"
    cells = rank_row(KINDS[kind], BATCH, _EACH, tmp_path / "ranks")
    assert f"| {kind} | {' | '.join(cells)} |" in PAGE.read_text().partition("## Two ranks")[2]


@pytest.mark.timeout(240)
def test_so_it_is_with_a_stop(tmp_path):
    kind = "`StatefulDataLoader`, `shuffle=True`, 1 worker"
    assert f"| {kind} | {' | '.join(['yes'] * len(LAUNCHERS))} |" in PAGE.read_text()
    assert stop_cell("`ddp_fork`", "kill -9", tmp_path, kind) == "yes"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "launcher"), STOPPED)
def test_so_it_is_with_each_stop_under_each_launcher(kind, launcher, tmp_path):
    assert dict(zip(STOPS, stop_row(launcher, tmp_path, kind), strict=True)) == dict.fromkeys(STOPS, "yes")
