"""The script for completion by the shell, used as the shell uses it."""

import shutil
import subprocess
import sys

import pytest

from polyphase.engine.cli import COMMANDS
from polyphase.engine.cli.runs import flags_of, print_completion


@pytest.fixture
def script(capsys) -> str:
    print_completion(["--print_shtab", "bash"], COMMANDS)
    return capsys.readouterr().out


def test_it_names_our_flags(script):
    for name in flags_of("fit"):
        assert f"--{name}" in script or name.endswith(".NAME")


@pytest.mark.parametrize("words", [["--print_shtab=zsh"], ["--print_shtab-zsh"], ["fit", "--print_shtab", "bash"]])
def test_other_shells_and_spellings(words, capsys):
    print_completion(words, COMMANDS)
    assert "--global_batch_size" in capsys.readouterr().out.replace("\\", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="a test of bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("polyphase stra", "strategies"),
        ("polyphase fit --stra", "--strategy"),
        ("polyphase fit --strategy hs", "hsdp hsdp+tp hsdp+cp"),
        ("polyphase fit --precision bf", "bf16-mixed bf16-true bf16-blocks"),
        ("polyphase strategies fs", "fsdp fsdp+tp fsdp+cp"),
        ("polyphase ckpt in", "inspect"),
    ],
)
def test_bash_completes(words, completed, script, tmp_path):
    (tmp_path / "completion").write_text(script)
    last = len(words.split()) - 1
    call = f"source completion; COMP_WORDS=({words}); COMP_CWORD={last}; _shtab_polyphase; echo ${{COMPREPLY[*]}}"
    finished = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == completed


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        print_completion(["--print_shtab", "bash"], COMMANDS)
    assert "pip install shtab" in capsys.readouterr().err
