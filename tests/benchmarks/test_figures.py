"""The figures are drawn from the reports, and their legends can be read."""

import re
import shutil
import sys

import pytest

from tests.distributed import ROOT, run_command

RESULTS = ROOT / "benchmarks" / "results"
DRAW = """\
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import figures
figures.RESULTS = Path(sys.argv[1])
figures.main()
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for path in (*RESULTS.glob("*.md"), *RESULTS.glob("*.csv")):
        shutil.copy(path, folder)
    script = DRAW.format(folder=str(ROOT / "benchmarks"))
    finished = run_command([sys.executable, "-c", script, folder])
    assert finished.returncode == 0, finished.output
    return folder


@pytest.mark.parametrize("name", ["convergence-cpu", "wire-cpu", "overhead-cpu"])
def test_a_figure_has_the_words_of_the_committed_one(drawn, name):
    new, committed = (
        set(re.findall(r"<!-- (.*?) -->", (folder / f"{name}.svg").read_text())) for folder in (drawn, RESULTS)
    )
    assert new == committed, "draw it again: python benchmarks/figures.py"
    assert not [words for words in new if "{tenth" in words or "start=" in words]
    assert max(map(len, new)) > 30, "it has a title"


def test_methods_have_colours_of_their_own():
    text = (ROOT / "benchmarks" / "figures.py").read_text()
    colours = re.findall(r'": "(#\w{6})"', text)
    assert len(colours) > 10
    assert len(set(colours)) == len(colours)
