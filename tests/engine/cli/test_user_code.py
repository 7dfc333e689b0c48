"""What fails in a user's own module is shown as theirs."""

import sys
from pathlib import Path

import pytest

from polyphase.engine.cli.lightning_cli import _import_classes, run

BROKEN = {
    "needs_more": ("import json, no_such_thing\nclass Net: ...\n", "No module named 'no_such_thing'"),
    "raises": ("import json\ndef f():\n    json.loads('x')\nf()\nclass Net: ...\n", "Expecting value: line 1"),
    "no_python": ("x = (\n", "was never closed"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_an_error_of_the_users_module_keeps_its_traceback(name, monkeypatch):
    text, message = BROKEN[name]
    Path(f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(".")
    with pytest.raises((ImportError, ValueError, SyntaxError), match=message):
        run(["fit", "--data", "Digits", "--model", f"{name}.Net"])


def test_what_is_no_module_is_left_alone():
    Path("a.b").write_text("")
    _import_classes(["--model", "ByteGPT", "--data", "a.b", "--model={}", "--model"])
    assert "a" not in sys.modules
