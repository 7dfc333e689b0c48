"""The pages of the documentation outside of docs/howto: their code, what it prints, and their links."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from polyphase.engine.cli import main
from tests.distributed import ROOT, run_command

from .pages import environment

DOCS = ROOT / "docs"
PAGES = (
    "architecture",
    "choosing",
    "coming-from",
    "comparison",
    "compatibility",
    "doctor",
    "glossary",
    "index",
    "one-to-eight",
    "quickstart",
    "reference/api",
    "reference/callbacks",
    "reference/cli",
    "reference/exceptions",
    "reference/file-formats",
    "reference/flags",
    "reference/options",
    "troubleshooting",
    "tuning",
    "versions",
)
"""Pages all of whose Python is run; the older ones have tests where they are about."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\S+\.py)\n")
_NUMBER = re.compile(r"\d[\d.,]*(e-?\d+)?")
NOT_RUN = "# not run here"
"""Marks code of another library, which a page shows for comparison."""


class Shown(NamedTuple):
    """A command that a page shows with its output."""

    command: str
    output: str


def python_blocks(path: Path) -> list[str]:
    """The Python blocks of a page that are run, in order."""
    found = [text for language, text in _FENCE.findall(path.read_text()) if language == "python"]
    return [text for text in found if NOT_RUN not in text]


def starts_processes(text: str) -> bool:
    """Whether a block starts itself again, which can't be done from here: it is run in a process of its own."""
    return re.search(r'devices"?[=:] ?2', text) is not None and "_fork" not in text


def shown(path: Path) -> Iterator[Shown]:
    """The blocks of a page that show a command and its output."""
    for language, text in _FENCE.findall(path.read_text()):
        if language == "console":
            first, _, output = text.partition("\n")
            yield Shown(first.removeprefix("$ "), output)


def run_blocks(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int) -> None:
    """Runs the blocks of a page in this process: those with a file name as scripts, the others together."""
    for name, value in environment(strategy, devices).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder))
    variables: dict[str, object] = {"__name__": "__main__"}
    for text in python_blocks(path):
        named = _NAME.match(text)
        if named is None and not starts_processes(text):
            exec(compile(text, f"{path.name}, a block", "exec"), variables)  # noqa: S102 - the code of our own page
        if named is None:
            continue
        (folder / named[1]).write_text(text)
        monkeypatch.setattr(sys, "argv", [named[1]])
        if not starts_processes(text):
            runpy.run_path(str(folder / named[1]), run_name="__main__")


def output_of(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of a command: of the engine's own, in this process; of others, in one of their own."""
    words = shlex.split(command)
    if words[0] != "polyphase" or words[1] in ("verify", "bench-comm") or "--explain" in words:
        flags = [f"PATH={environment('single', 1)['PATH']}", "COLUMNS=120"]
        finished = run_command(["env", *flags, *words], timeout_s=170)
        assert finished.returncode == 0, finished.output
        return finished.output
    monkeypatch.setattr(sys, "argv", words)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()


def differs(expected: str, found: str) -> str | None:
    """The first line of `expected` that `found` lacks at its place; numbers count as equal, ``...`` as any lines."""
    lines = [_plain(line) for line in found.splitlines() if line.strip()]
    at, may_skip = 0, False
    for line in expected.splitlines():
        if not line.strip():
            continue
        if line.strip() == "...":
            may_skip = True
            continue
        rest = lines[at:] if may_skip else lines[at : at + 1]
        if _plain(line) not in rest:
            return f"{line!r}, found {lines[at : at + 3]}"
        at, may_skip = at + rest.index(_plain(line)) + 1, False
    return None


def _plain(line: str) -> str:
    """A line without its numbers, and without the spaces that fill up columns."""
    return re.sub(r"\s+", " ", _NUMBER.sub("0", line)).strip()
