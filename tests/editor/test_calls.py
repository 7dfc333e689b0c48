"""What a user's editor says: a type checker reports each wrong call of `calls.py`, and no right one."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..typecheck import link_packages

CALLS = Path(__file__).with_name("calls.py")


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What Pyright's checker (of basedpyright, which needs no download) says by line, with an editor's usual rules."""
    folder = tmp_path_factory.mktemp("project")
    link_packages(folder)
    shutil.copy(CALLS, folder)
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard", "include": ["calls.py"]}))
    command = [sys.executable, "-m", "basedpyright", f"--pythonpath={sys.executable}", "--outputjson", "-p", folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170)
    messages: dict[int, str] = {}
    for found in json.loads(result.stdout)["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        messages[line] = messages.get(line, "") + found["message"]
    return messages


def test_each_wrong_call_is_reported_and_no_right_one(reported):
    lines = enumerate(CALLS.read_text().splitlines(), start=1)
    wrong = {number: match[1] for number, line in lines if (match := re.search(r"# wrong: (.*)", line))}
    assert len(wrong) > 40
    assert set(reported) == set(wrong)
    assert not {number: reported[number] for number, part in wrong.items() if part not in reported[number]}
