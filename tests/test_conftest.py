"""What tests run writes nothing into the repository."""

from pathlib import Path

import pytest

from .distributed import ROOT


@pytest.fixture(scope="module")
def folder_of_the_module():
    return Path.cwd()


def test_nothing_runs_in_the_repository(folder_of_the_module):
    for folder in (folder_of_the_module, Path.cwd()):
        assert not folder.is_relative_to(ROOT)
