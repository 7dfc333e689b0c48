"""What fails in a user's own module is shown as theirs."""

import sys
from pathlib import Path

import pytest

from polyphase.engine.cli import import_classes

BROKEN = {
    "needs_more": ("import json, no_such_thing\nclass Net: ...\n", "No module named 'no_such_thing'"),
    "raises": ("import json\ndef f():\n    json.loads('x')\nf()\nclass Net: ...\n", "Expecting value: line 1"),
    "no_python": ("x = (\n", "SyntaxError: '(' was never closed"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_the_frames_are_the_users_and_the_message_is_last(name, monkeypatch, capsys):
    text, message = BROKEN[name]
    Path(f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(".")
    with pytest.raises(SystemExit) as ended:
        import_classes(["--data", "Digits", "--model", f"{name}.Net"])
    assert ended.value.code == 1
    *frames, error, last = capsys.readouterr().err.splitlines()
    assert message in error
    assert last == f"polyphase: error: --model: importing {name} failed, see above."
    files = [line for line in frames if line.startswith("  File")]
    assert files
    assert all(f"{name}.py" in line for line in files)
    assert not any("json/decoder" in line for line in frames)


def test_what_is_no_module_is_left_alone(monkeypatch):
    Path("a.b").write_text("")
    import_classes(["--model", "ByteGPT", "--data", "a.b", "--model={}", "--model"])
    assert "a" not in sys.modules
