"""The example of a package with a strategy and a comm hook: installed, found by its entry points, and trained."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT, run_command

PACKAGE = ROOT / "examples" / "own_strategy"

# As with the folder in PYTHONPATH, with which no interpreter is warm.
COMMAND = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("polyphase.engine", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("own_strategy")
    sources = shutil.copytree(PACKAGE, folder / "sources")  # a build leaves files beside them
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    finished = run_command([*pip, "--target", folder / "site", sources])
    assert finished.returncode == 0, finished.output
    return folder / "site"


def polyphase(installed: Path, *words: str, cwd: Path):
    return run_command([sys.executable, "-c", COMMAND, str(installed), *words], timeout_s=240, cwd=cwd)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_it_trains_by_its_flags_in_workers_too(installed, tmp_path):
    flags = ["--strategy", "loud_spawn:every=2", "--compression", "rounded:0.0001", "--devices", "2"]
    data = ["--model", "DigitsClassifier", "--data", "Digits", "--max_steps", "3", "--accelerator", "cpu"]
    finished = polyphase(installed, "fit", *data, *flags, cwd=tmp_path)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("of each of 2 ranks") == 2, "batches 0 and 2, by rank 0 alone"
    assert "`max_steps=3` reached" in finished.output


def test_its_options_are_checked(installed, tmp_path):
    data = ["--model", "DigitsClassifier", "--data", "Digits"]
    finished = polyphase(installed, "fit", *data, "--strategy", "loud:evry=2", cwd=tmp_path)
    assert finished.returncode != 0
    assert "unknown option of strategy 'loud' 'evry'. Did you mean 'every'?" in finished.output


def test_without_it_the_names_are_unknown(tmp_path):
    data = ["--model", "DigitsClassifier", "--data", "Digits"]
    finished = run_command([sys.executable, "-m", "polyphase.engine", "fit", *data, "--strategy", "loud"], cwd=tmp_path)
    assert finished.returncode != 0
    assert "unknown strategy 'loud'" in finished.output
