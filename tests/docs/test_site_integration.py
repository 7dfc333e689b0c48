"""The quickstart as a reader starts it, the lines that README and home page begin with, and the site itself."""

import os
import re
import shutil
import sys

import pytest

from tests.distributed import ROOT, run_command

from .site import DOCS, differs, output_of, python_blocks, shown


def test_the_quickstart_prints_what_its_page_shows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script = python_blocks(DOCS / "quickstart.md")[0]
    (tmp_path / "train.py").write_text(script)
    (one,) = shown(DOCS / "quickstart.md")
    found = output_of(one.command, monkeypatch)
    # Two processes write their first lines in any order.
    expected = one.output.replace("Seed set to 0\n[rank: 1] Seed set to 0\n", "...\n")
    assert differs(expected, found) is None, found
    assert float(re.search(r"loss tensor\((.*)\)", found)[1]) < 0.1, "of 0.9 before training"


def test_the_lines_that_readme_and_home_page_begin_with_run(tmp_path):
    (script,) = python_blocks(ROOT / "README.md")
    assert python_blocks(DOCS / "index.md") == [script]
    (tmp_path / "lines.py").write_text(script)
    flags = ["PL_TRAINER_ACCELERATOR=cpu", "PL_TRAINER_MAX_EPOCHS=1"]
    finished = run_command(["env", *flags, sys.executable, "lines.py"], cwd=tmp_path, timeout_s=170)
    assert finished.returncode == 0, finished.output
    assert "fsdp, shard=2" in finished.output


def _build(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder / "site"]
    return run_command(["env", "NO_MKDOCS_2_WARNING=1", *command], cwd=folder, timeout_s=170)


def _copy(folder):
    for name in ("docs", "src", "engine", "callbacks", "doctor", "models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("benchmarks", "examples"):
        os.symlink(ROOT / name, folder / name)


@pytest.mark.nightly  # that it builds, `make docs` has shown before the tests
def test_the_site_builds_and_a_link_that_leads_nowhere_is_an_error(tmp_path):
    _copy(tmp_path)
    built = _build(tmp_path)
    assert built.returncode == 0, built.output
    page = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "read_weights" in page
    assert "largest absolute difference of a weight that counts as equal" in page, "the docstring of Engine.verify"
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'class="picture' in home, "pictures are in the page"
    assert not re.findall(r'(?:src|href)="https://(?!github\.com)[^"]*\.(?:js|css|woff2?)"', home), (
        "nothing from elsewhere"
    )
    glossary = tmp_path / "docs" / "glossary.md"
    links = ("[x](nowhere.md)", "[x](index.md#no-heading)", "[x](../outside.md)", "[x][polyphase.engine.Nothing]")
    glossary.write_text("\n".join([glossary.read_text(), *links]))
    broken = _build(tmp_path)
    assert broken.returncode != 0
    for problem in (
        "nowhere.md",
        "no-heading",
        "outside.md, which is not in the repository",
        "polyphase.engine.Nothing",
    ):
        assert problem in broken.output
