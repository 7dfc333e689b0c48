"""What a user's editor says: a type checker reports each wrong call of `calls.py`, and no right one."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..typecheck import link_packages

CALLS = Path(__file__).with_name("calls.py")


def reported(folder: Path, python: str | Path) -> dict[int, str]:
    """What Pyright's checker (of basedpyright, which needs no download) says of `calls.py`, by line.

    Args:
        folder: of the project; `calls.py` is put there.
        python: the interpreter whose packages are used.
    """
    shutil.copy(CALLS, folder)
    # An editor's usual rules; the checker's own are stricter.
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard", "include": ["calls.py"]}))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", "-p", folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170)
    messages: dict[int, str] = {}
    for found in json.loads(result.stdout)["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        messages[line] = messages.get(line, "") + found["message"]
    return messages


def check(messages: dict[int, str]) -> None:
    """Asserts that each line marked as wrong is in `messages`, with the words of its mark, and no other."""
    lines = enumerate(CALLS.read_text().splitlines(), start=1)
    wrong = {number: match[1] for number, line in lines if (match := re.search(r"# wrong: (.*)", line))}
    assert len(wrong) > 40
    assert set(messages) == set(wrong)
    assert not {number: messages[number] for number, part in wrong.items() if part not in messages[number]}


def test_each_wrong_call_is_reported_and_no_right_one(tmp_path):
    link_packages(tmp_path)
    check(reported(tmp_path, sys.executable))
