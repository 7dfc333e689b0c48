"""What is built is what runs: from a wheel in an environment of its own, in spawned children, and zipped."""

import email
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

import polyphase

from ..distributed import ROOT, run_command
from ..editor.test_calls import check, reported
from ..pairs import nightly

LEFT_OUT = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "failures", "*logs")

SCRIPT = """
import importlib, pkgutil, sys
from pathlib import Path

import polyphase
from lightning.pytorch import Callback
from polyphase import Engine, fit
from polyphase.models import Digits, DigitsClassifier

class Tells(Callback):
    def on_train_end(self, trainer, pl_module):
        told = f"{trainer.global_step} steps by {sys.modules['polyphase.engine'].__file__}"
        Path(f"rank-{trainer.global_rank}").write_text(told)

if __name__ == "__main__":
    for module in pkgutil.walk_packages(polyphase.__path__, "polyphase."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    flags = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    flags |= dict(strategy="ddp_spawn", devices=int(sys.argv[1]), max_steps=3, callbacks=Tells())
    engine = fit(DigitsClassifier(), Digits(), **flags)
    assert isinstance(engine, Engine)
    print("imported from", polyphase.__file__)
"""


def build(folder, *options):
    command = [sys.executable, "-m", "build", "--no-isolation", folder / "sources", *options]
    result = run_command(command, cwd=folder)
    assert result.returncode == 0, result.output


def once(name, fill):
    """A folder that the first of the processes that run tests fills, for all of them."""
    folder = Path(tempfile.gettempdir(), name)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            fill(folder)
            (folder / "is_whole").touch()
    assert (folder / "is_whole").exists(), "another process has failed to make it"
    return folder


@pytest.fixture(scope="module")
def built():
    """A source distribution and the wheel made of it, beside the sources."""

    def fill(folder):
        shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*LEFT_OUT))
        build(folder, "--outdir", folder)

    return once("built", fill)


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel):
    """The Python of an environment with the wheel, and the dependencies of this one; the sources are not in it."""

    def fill(folder):
        run_command([sys.executable, "-m", "venv", "--without-pip", folder])
        flags = ["--no-deps", "--no-index", "--disable-pip-version-check"]
        python = folder / "bin" / "python"
        result = run_command([sys.executable, "-m", "pip", "--python", python, "install", *flags, wheel])
        assert result.returncode == 0, result.output
        site = next((folder / "lib").glob("python*/site-packages"))
        # A path in a .pth file is searched, but .pth files found there, such as an editable install's, are not run.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    return once("installed", fill) / "bin" / "python"


@pytest.mark.nightly
def test_the_source_distribution_builds_the_same_wheel_as_the_sources(built, wheel):
    assert wheel.name == f"polyphase-{polyphase.__version__}-py3-none-any.whl"
    build(built, "--wheel", "--outdir", built / "direct")
    contents = []
    for path in (wheel, built / "direct" / wheel.name):
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")})
    assert contents[0] == contents[1]


def test_the_source_distribution_has_what_its_tests_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["engine/py.typed", "src/polyphase/py.typed", "tests/conftest.py", "tests/editor/calls.py", "CHANGELOG.md"]
    assert {*needed, "Makefile", ".ci/run", "examples/digits.py", "docs/strategies.md", "LICENSE"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_has_all_modules_and_each_package_is_typed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folders = [(name, f"polyphase/{name}") for name in ("engine", "callbacks", "doctor", "models")]
    for source, target in [("src/polyphase", "polyphase"), *folders]:
        modules = {f"{target}/{path.relative_to(ROOT / source).as_posix()}" for path in (ROOT / source).rglob("*.py")}
        assert modules | {f"{target}/py.typed"} <= names
    assert not [name for name in names if not name.startswith(("polyphase/", "polyphase-"))]


@pytest.mark.nightly  # the wheel's marks of typed packages are looked for above, the types themselves in tests/editor
def test_an_editor_finds_the_types_in_what_is_installed(installed, tmp_path):
    check(reported(tmp_path, installed))


def test_what_an_index_shows(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == polyphase.__version__
    assert metadata["Maintainer"] == "The Polyphase authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert {"all", "cli"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_the_links_of_the_readme_hold_on_an_index_page(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        text = email.message_from_bytes(archive.read(name)).get_payload()
    pages = re.findall(r"(?<!!)\[[^]]*\]\(([^)#]+)", text)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)", text)
    assert len(pages) == len(re.findall(r"(?<!!)\[[^]]*\]\(", (ROOT / "README.md").read_text())) > 10
    assert pictures == ["https://raw.githubusercontent.com/polyphase/polyphase/main/docs/pictures/readme.svg"]
    for link in pages:
        own = re.fullmatch(r"https://github\.com/polyphase/polyphase/blob/main/(.*)", link)
        assert own, link
        assert (ROOT / own[1]).exists(), link


def test_this_version_is_in_the_changelog():
    assert re.search(rf"^## {re.escape(polyphase.__version__)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("devices", [1, *nightly(2)])
def test_from_the_wheel_all_is_imported_and_spawned_children_train(devices, installed, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_command([installed, "train.py", str(devices)], cwd=tmp_path, timeout_s=360)
    assert result.returncode == 0, result.output
    environment = installed.parents[1]
    assert f"imported from {environment}" in result.output
    for rank in range(devices):
        assert (tmp_path / f"rank-{rank}").read_text().startswith(f"3 steps by {environment}")


@pytest.mark.parametrize("how", ["module", "script", "editable"])
def test_the_command_by_its_module_and_by_its_script(installed, tmp_path, how):
    module = ["-m", "polyphase", "--version"]
    command = {
        "module": [installed, *module],
        "script": [installed.with_name("polyphase"), "--version"],
        "editable": [sys.executable, *module],
    }[how]
    result = run_command(command, cwd=tmp_path)
    assert result.output.strip() == f"polyphase {polyphase.__version__}"


ZIPPED = """
import polyphase.callbacks, polyphase.models
from polyphase import Engine, fit
print(polyphase.__file__, Engine(accelerator="cpu", devices=1).layout, polyphase.__version__)
"""


@pytest.mark.nightly
def test_from_a_zip(installed, wheel, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    output = subprocess.check_output([installed, "-c", ZIPPED], cwd=tmp_path, env=environment, text=True, timeout=120)
    assert f"{wheel}/polyphase/__init__.py one device {polyphase.__version__}" in output
