"""What tests run writes nothing into the repository."""

from pathlib import Path

import pytest

from .conftest import ALONE, DEADLINES, PARTS, pytest_ignore_collect
from .distributed import ROOT


@pytest.fixture(scope="module")
def folder_of_the_module():
    return Path.cwd()


def test_nothing_runs_in_the_repository(folder_of_the_module):
    for folder in (folder_of_the_module, Path.cwd()):
        assert not folder.is_relative_to(ROOT)


def test_files_of_a_part_are_there():
    assert not [name for name in (*ALONE, *DEADLINES) if not (ROOT / "tests" / name).exists()]


def test_each_file_is_of_one_part(pytestconfig, monkeypatch):
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "compatibility" not in file.parts]
    seen = []
    for part in PARTS:
        monkeypatch.setattr(pytestconfig.option, "part", part)
        seen += [file for file in files if not pytest_ignore_collect(file, pytestconfig)]
    assert sorted(seen) == sorted(files)
    assert len(seen) > len(ALONE) + len(DEADLINES)
