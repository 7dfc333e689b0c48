"""The fenced blocks of a page under docs/howto, run as a reader would: saved to files, started as scripts."""

import logging
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed import ROOT, Finished, run_command

HOWTO = ROOT / "docs" / "howto"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\S+\.py)\n")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in _FENCE.findall((HOWTO / f"{page}.md").read_text())]


class Page:
    """A page whose Python blocks are written to the files that their first lines name, in the working directory."""

    def __init__(self, name: str) -> None:
        self.commands = [block.text for block in blocks(name) if block.language == "bash"]
        self.folder = Path.cwd()
        for block in blocks(name):
            found = _NAME.match(block.text)
            if found:
                (self.folder / found[1]).write_text(block.text)

    def run_here(
        self, script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str, strategy: str = "single", devices: int = 1
    ) -> dict[str, Any]:
        """Runs a script in this process, which saves a start; returns its variables."""
        for name, value in _flags(strategy, devices).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(str(self.folder))
        # Lightning's own writes to the standard error of the time when it was imported.
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger("lightning.pytorch").addHandler(handler)
        try:
            return runpy.run_path(str(self.folder / script), run_name="__main__")
        finally:
            logging.getLogger("lightning.pytorch").removeHandler(handler)

    def clear(self, name: str) -> None:
        """Removes a file or folder that a script has left."""
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def run(self, *command: str, strategy: str = "single", devices: int = 1, timeout_s: float = 120) -> Finished:
        """Runs a command of the page in a process of its own."""
        flags = [f"{name}={value}" for name, value in environment(strategy, devices).items()]
        return run_command(["env", *flags, *command], timeout_s=timeout_s, cwd=self.folder)


def environment(strategy: str, devices: int) -> dict[str, str]:
    """What chooses a strategy for a script that names none, and finds the commands of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, **_flags(strategy, devices)}


def _flags(strategy: str, devices: int) -> dict[str, str]:
    return {
        "PL_TRAINER_STRATEGY": strategy,
        "PL_TRAINER_DEVICES": str(devices),
        "PL_TRAINER_ACCELERATOR": "cpu",
    }
