"""benchmarks/results/data-cpu.md says what is found of public libraries' data, of those that are installed."""

import pytest

from .data_libraries import former_rows, is_installed, label, row
from .data_matrix import PAGE
from .package_run import KINDS


def test_the_page_has_a_row_of_each_and_nothing_is_silently_read_otherwise():
    rows = former_rows(PAGE.read_text())
    for name, (first, *_) in zip(KINDS, rows, strict=True):
        assert first == (label(name) if is_installed(KINDS[name]) else first)
    assert "SILENTLY" not in str(rows)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_so_it_is(name, tmp_path):
    if not is_installed(KINDS[name]):
        pytest.skip(f"needs {KINDS[name].package}")
    assert [label(name), *row(name, tmp_path)] in former_rows(PAGE.read_text())
