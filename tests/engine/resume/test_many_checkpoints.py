"""`resume="auto"` opens a few checkpoints, however many there are, and never the wrong one."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from polyphase.callbacks import Snapshot
from polyphase.engine.checkpoint import find
from polyphase.engine.checkpoint.folder_index import FolderIndex
from tests.engine.tiny import Regression, engine, rows

OPENED: list[str] | None = None


def note(event, arguments):
    if event == "open" and OPENED is not None and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


sys.addaudithook(note)


def train(folder: Path, steps: int, **flags):
    """A run that keeps a snapshot of each step; returns the files in its folder of snapshots that it has opened."""
    global OPENED
    snapshot = Snapshot(every_n_steps=1, every_minutes=None, keep_every_n_steps=1)
    trainer = engine(default_root_dir=folder, callbacks=[snapshot], max_epochs=-1, max_steps=steps, **flags)
    OPENED = []
    trainer.fit(Regression(), rows(40))
    opened, OPENED = [path for path in OPENED if str(folder / "snapshots") in path], None
    return trainer, opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders with 50 and 200 snapshots."""
    folders = [tmp_path_factory.mktemp("runs") / str(number) for number in (50, 200)]
    for folder in folders:
        train(folder, int(folder.name))
    return folders


@pytest.fixture
def copies(runs, tmp_path):
    return [shutil.copytree(folder, tmp_path / folder.name, symlinks=True) for folder in runs]


@pytest.mark.parametrize("logger", [False, True])
def test_as_many_files_are_opened_whatever_the_number_of_old_checkpoints(logger, copies):
    numbers = []
    for folder in copies:
        trainer, opened = train(folder, int(folder.name) + 1, resume="auto", logger=logger)
        assert trainer.global_step == int(folder.name) + 1
        numbers.append(len(opened))
        assert len({Path(path).parent.name for path in opened if "step=" in Path(path).parent.name}) <= 3
    assert numbers[0] == numbers[1] < 60


def test_a_copy_with_other_times_and_no_index_opens_each_once_and_the_next_run_none(copies):
    folder = copies[0]
    (folder / "snapshots" / ".index.jsonl").unlink()
    _, opened = train(folder, 51, resume="auto")
    old = [path for path in opened if path.endswith(("step=7/MANIFEST.json", "step=8/MANIFEST.json"))]
    assert len(old) == len({*old}) == 2
    _, opened = train(folder, 52, resume="auto")
    assert not [path for path in opened if "step=7/" in path or "step=8/" in path]


def test_what_the_index_says_is_believed_only_of_the_same_file(copies):
    folder = copies[0]
    snapshots = folder / "snapshots"
    # The newest is another one than the index says: step 20's directory came back from elsewhere, and 50's is gone.
    shutil.rmtree(snapshots / "step=50")
    os.utime(snapshots / "step=20" / "MANIFEST.json")
    lines = [json.loads(line) for line in (snapshots / ".index.jsonl").read_text().splitlines()]
    for line in lines:
        if line["name"] == "step=20":
            line["sequence"] = 10**9
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (snapshots / ".index.jsonl").write_text(text + '{"name": "step=3", "si\n[]\n{"name": "../step=1"}\n')
    trainer, _ = train(folder, 51, resume="auto")
    assert trainer.global_step == 51
    assert [Path(path).name for path, _ in find(snapshots)][:3] == ["step=51", "step=50", "step=49"]


def test_a_link_in_place_of_the_index_is_not_followed(copies):
    snapshots = copies[0] / "snapshots"
    (snapshots / ".index.jsonl").rename(copies[0] / "elsewhere")
    (snapshots / ".index.jsonl").symlink_to(copies[0] / "elsewhere")
    before = (copies[0] / "elsewhere").read_bytes()
    index = FolderIndex(str(snapshots))
    ((path, manifest),) = [each for each in find(snapshots) if each[1].step == 9]
    index.add(path, manifest)
    assert (copies[0] / "elsewhere").read_bytes() == before
    train(copies[0], 51, resume="auto")
    assert (copies[0] / "elsewhere").read_bytes() == before
    assert not (snapshots / ".index.jsonl").is_symlink()


def test_the_index_does_not_grow_with_checkpoints_that_are_gone(tmp_path):
    trainer = engine(
        default_root_dir=tmp_path, callbacks=[Snapshot(every_n_steps=1, every_minutes=None, keep_last=2)],
        max_epochs=-1, max_steps=200,
    )  # fmt: skip
    trainer.fit(Regression(), rows(40))
    assert len((tmp_path / "snapshots" / ".index.jsonl").read_text().splitlines()) <= 80
