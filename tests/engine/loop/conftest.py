"""Fixtures of the tests that run the engine beside Lightning's trainer."""

from functools import partial

import pytest

from .stock_comparison import compare


@pytest.fixture
def same(tmp_path):
    """`compare`, in the test's own folder."""
    return partial(compare, tmp_path)
