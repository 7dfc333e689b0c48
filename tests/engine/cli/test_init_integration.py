"""`polyphase init`: what it writes runs as it is, by its README's commands, and passes its own test."""

import re
import sys
from pathlib import Path

import pytest

from polyphase.engine.cli.init import FILES, main
from tests.distributed import run_command
from tests.pairs import nightly


def test_it_writes_a_project_and_says_how_to_run_it(capsys):
    assert main(["new/project"]) == 0
    assert sorted(path.name for path in Path("new/project").iterdir()) == sorted(FILES)
    assert "cd new/project\npolyphase fit --config run.yaml --strategy ddp" in capsys.readouterr().out


def test_it_overwrites_nothing(capsys):
    Path("run.yaml").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["."])
    assert ended.value.code == 2
    assert "init: . has run.yaml already, and nothing is overwritten." in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
    assert Path("run.yaml").read_text() == "mine"


def test_a_place_that_cannot_be_written_to(capsys):
    Path("file").write_text("")
    with pytest.raises(SystemExit):
        main(["file/project"])
    assert "init: can't write to file/project: " in capsys.readouterr().err


# Its own test starts the other two, under one more strategy or another.
@pytest.mark.parametrize("first", [2, *nightly(0)])
@pytest.mark.timeout(600)
def test_its_commands_and_its_own_test_pass(first):
    main(["project"])
    block = re.search(r"```bash\n(.*?)```", Path("project/README.md").read_text(), re.DOTALL)
    commands = [line.split() for line in block[1].splitlines()]
    assert [words[0] for words in commands] == ["polyphase", "python", "python"]
    for words in commands[first:]:
        start = [sys.executable, "-m", "polyphase"] if words[0] == "polyphase" else [sys.executable]
        finished = run_command([*start, *words[1:]], timeout_s=400, cwd=Path("project"))
        assert finished.returncode == 0, finished.output
    assert "3 passed" in finished.output


def test_without_scikit_learn_its_data_are_made_up(monkeypatch):
    main(["project"])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.syspath_prepend("project")
    import my_data

    try:
        images, classes = my_data.load()
    finally:
        del sys.modules["my_data"]
    assert images.shape == (1797, 64)
    assert classes.unique().tolist() == list(range(10))
