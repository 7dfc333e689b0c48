"""What tests run writes nothing into the repository."""

from pathlib import Path

import pytest

from .conftest import ALONE
from .distributed import ROOT


@pytest.fixture(scope="module")
def folder_of_the_module():
    return Path.cwd()


def test_nothing_runs_in_the_repository(folder_of_the_module):
    for folder in (folder_of_the_module, Path.cwd()):
        assert not folder.is_relative_to(ROOT)


def test_files_that_run_alone_are_there():
    assert not [name for name in ALONE if not (ROOT / "tests" / name).exists()]
