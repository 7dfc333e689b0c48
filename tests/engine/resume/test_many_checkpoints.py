"""`resume="auto"` opens a few checkpoints, however many there are, and never the wrong one."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from polyphase.callbacks import Snapshot
from polyphase.engine.checkpoint import find
from polyphase.engine.checkpoint.folder_index import FolderIndex
from tests.engine.tiny import Regression, engine, rows

OPENED: list[str] | None = None


def note(event, arguments):
    if event == "open" and OPENED is not None and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


sys.addaudithook(note)


class Started(Callback):
    """Notes the step at which training begins."""

    def on_train_start(self, trainer, pl_module):
        self.at = trainer.global_step


def train(folder: Path, steps: int, *callbacks: Callback, **flags):
    """A run that keeps a snapshot of each step; returns the files in its folder of snapshots that it has opened."""
    global OPENED
    snapshot = Snapshot(every_n_steps=1, every_minutes=None, keep_every_n_steps=1)
    trainer = engine(default_root_dir=folder, callbacks=[snapshot, *callbacks], max_epochs=-1, max_steps=steps, **flags)
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


def planted(snapshots: Path, *edits: tuple[str, dict[str, Any]]) -> None:
    """Writes the index with other values in the lines of some checkpoints."""
    lines = {line["name"]: line for line in map(json.loads, (snapshots / ".index.jsonl").read_text().splitlines())}
    for name, values in edits:
        lines[name].update(values)
    (snapshots / ".index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines.values()))


@pytest.mark.parametrize(
    "edits",
    [
        [("step=20", {"sequence": 10**9})],
        [("step=20", {"sequence": (1 << 62) - 1})],
        [("step=50", {"sequence": 0})],
        [("step=50", {"kind": "weights"}), ("step=49", {"kind": "weights"})],
        [("step=50", {"run": "another", "step": 7})],
        [("step=50", {"sequence": 49}), ("step=49", {"sequence": 50})],
    ],
)
def test_a_planted_line_makes_no_run_continue_from_an_older_one(copies, edits):
    folder = copies[0]
    planted(folder / "snapshots", *edits)
    trainer, _ = train(folder, 51, resume="auto")
    assert (trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.completed) == (51, 51)
    assert [Path(path).name for path, _ in find(folder / "snapshots")][:3] == ["step=51", "step=50", "step=49"]


def test_if_the_newest_is_damaged_the_others_are_opened_and_the_index_is_not_believed(copies):
    folder = copies[0]
    snapshots = folder / "snapshots"
    planted(snapshots, *((f"step={step}", {"kind": "weights"}) for step in range(40, 50)))
    (snapshots / "step=50" / "rest.pt").unlink()
    started = Started()
    with pytest.warns(UserWarning, match="An older one is used"), pytest.warns(UserWarning, match="was renamed to"):
        train(folder, 50, started, resume="auto")
    assert started.at == 49
    assert [Path(path).name for path, _ in find(snapshots)][:2] == ["step=50", "step=49"]


def test_a_planted_line_makes_no_run_remove_or_replace_what_another_has_saved(tmp_path):
    """Nor a snapshot that is to be kept for ever."""
    ours, snapshots = tmp_path / "run", tmp_path / "run" / "snapshots"
    keep = {"every_minutes": None, "keep_last": 2, "keep_every_n_steps": 4}
    for steps, folder in ((3, tmp_path / "other"), (6, ours)):
        trainer = engine(default_root_dir=folder, callbacks=[Snapshot(every_n_steps=1, **keep)], max_steps=steps)
        trainer.fit(Regression(), rows(40))
    shutil.move(tmp_path / "other" / "snapshots" / "step=3", snapshots / "step=3")
    shutil.copytree(tmp_path / "other" / "snapshots" / "step=2", snapshots / "step=7")
    for number, name in enumerate(("step=3", "step=7", "step=4", "step=5", "step=6")):
        os.utime(snapshots / name / "MANIFEST.json", ns=(10**18, 10**18 + number * 10**9))
    index = FolderIndex(str(snapshots))
    index.write(find(snapshots))
    run = next(manifest.run for path, manifest in find(snapshots) if Path(path).name == "step=6")
    planted(
        snapshots,
        ("step=3", {"run": run, "sequence": 1}),
        ("step=7", {"run": run, "sequence": 2}),
        ("step=4", {"step": 3, "sequence": 3}),
    )
    trainer = engine(default_root_dir=ours, callbacks=[Snapshot(every_n_steps=1, **keep)], max_steps=9, resume="auto")
    trainer.fit(Regression(), rows(40))
    names = ["step=3", "step=4", "step=7", "step=8", "step=9"]
    assert sorted(path.name for path in snapshots.glob("step*")) == names
    by_name = {Path(path).name: manifest for path, manifest in find(snapshots)}
    assert by_name["step=3"].run == by_name["step=7"].run != run
    assert by_name["step=9"].run == run


def test_no_name_in_the_folder_is_a_command_for_the_terminal(tmp_path, capfd):
    train(tmp_path, 2)
    escape = "\x1b]0;PWNED\x07"
    for name, content in ((f"step=3{escape}", "{"), (f"step=4{escape}.damaged", "[]")):
        (tmp_path / "snapshots" / name).mkdir()
        (tmp_path / "snapshots" / name / "MANIFEST.json").write_text(content)
    with pytest.warns(UserWarning, match="It is skipped") as told:
        train(tmp_path, 3, resume="auto")
    assert len(told) >= 2
    assert not [warning for warning in told if "\x1b" in str(warning.message)]
    assert "\x1b" not in "".join(capfd.readouterr())


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_the_index_is_not_waited_for(tmp_path):
    (tmp_path / "snapshots").mkdir()
    os.mkfifo(tmp_path / "snapshots" / ".index.jsonl")
    trainer, _ = train(tmp_path, 2, resume="auto")
    assert trainer.global_step == 2
    assert (tmp_path / "snapshots" / ".index.jsonl").is_file()
    os.remove(tmp_path / "snapshots" / ".index.jsonl")
    os.mkfifo(tmp_path / "snapshots" / ".index.jsonl")
    ((path, manifest), *_) = find(tmp_path / "snapshots")
    FolderIndex(str(tmp_path / "snapshots")).add(path, manifest)


def test_an_index_that_is_another_name_of_a_file_leaves_that_alone(copies):
    snapshots = copies[0] / "snapshots"
    os.link(snapshots / ".index.jsonl", copies[0] / "elsewhere")
    before = (copies[0] / "elsewhere").read_bytes()
    train(copies[0], 51, resume="auto")
    assert (copies[0] / "elsewhere").read_bytes() == before


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
