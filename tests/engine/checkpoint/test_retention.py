"""What is in a folder of checkpoints, and what `prune` leaves of it."""

import contextlib
import functools
import os
import shutil
from pathlib import Path

import fsspec
import pytest

from polyphase.engine.checkpoint import find
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.checkpoint.publish import begin, discard, repair, update_link, writing_file
from polyphase.engine.checkpoint.retention import list_entries, prune
from polyphase.engine.checkpoint.single_file import HEAD

from ...distributed import in_a_fork
from .sample_checkpoints import is_whole, saved


def steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in find(folder)]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def derive_seed(folder: Path) -> None:
    """Checkpoints of steps 1, 2 and 3; one that is damaged, two unfinished ones and something else."""
    saved(folder, 1, 2, 3)
    update_link(folder / "step=3")
    damaged, left, removal = (shutil.copytree(folder / "step=1", folder / name) for name in ("bad", ".saving-1", "rm"))
    (damaged / MANIFEST).write_text("{}")
    (left / MANIFEST).unlink()
    (removal / MANIFEST).unlink()
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("mine")
    (folder / "run.yaml").write_text("mine")


def test_a_survey_says_what_each_directory_is(tmp_path):
    derive_seed(tmp_path)
    found = list_entries(tmp_path)
    assert [entry.name for entry in found[:3]] == ["step=3", "step=2", "step=1"]
    assert {entry.name: entry.kind for entry in found} == {
        **dict.fromkeys(("step=1", "step=2", "step=3"), "checkpoint"),
        **{"bad": "damaged", "other": "other", "rm": "unfinished", ".saving-1": "unfinished"},
    }
    assert all((entry.manifest is None) == bool(entry.problem) == (entry.kind != "checkpoint") for entry in found)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep_last": 1}, [12]),
        ({"keep_last": 3}, [12, 11, 10]),
        ({"keep_last": 99}, [*range(12, 0, -1)]),
        ({"keep_last": 1, "keep_every": 5}, [12, 10, 5]),
        ({"keep_last": 2, "keep_every": 1}, [*range(12, 0, -1)]),
    ],
)
def test_what_is_kept(tmp_path, options, left):
    saved(tmp_path, *range(1, 13))
    would = prune(tmp_path, **options, dry_run=True)
    assert steps(tmp_path) == [*range(12, 0, -1)]
    assert prune(tmp_path, **options) == would
    assert steps(tmp_path) == left
    assert [os.path.basename(path) for path in would.kept] == [f"step={step}" for step in left]
    assert sorted(os.listdir(tmp_path)) == [".lock", *sorted(f"step={step}" for step in left)]


def test_what_is_unfinished_goes_and_what_is_not_ours_stays(tmp_path):
    derive_seed(tmp_path)
    pruned = prune(tmp_path, keep_last=1)
    assert [os.path.basename(path) for path in pruned.removed] == ["step=2", "step=1", ".saving-1", "rm"]
    assert sorted(os.listdir(tmp_path)) == [".lock", "bad", "last", "other", "run.yaml", "step=3"]
    assert [note.split()[0] for note in pruned.notes] == [str(tmp_path / "bad"), str(tmp_path / "other")]


@pytest.mark.parametrize("form", ["directory", "file"])
def test_what_a_run_without_snapshots_is_saving_stays(tmp_path, form):
    saved(tmp_path, 1)
    with contextlib.ExitStack() as stack:
        if form == "directory":
            staging = begin(tmp_path / "step=2")
            stack.callback(discard, staging)
        else:
            stream, _ = stack.enter_context(writing_file(tmp_path / "step=2.ckpt"))
            stream.write(HEAD)
            stream.flush()
        (unfinished,) = tmp_path.glob(".saving-*")
        pruned = in_a_fork(functools.partial(prune, tmp_path, keep_last=1), timeout_s=60)
        assert pruned.removed == []
        assert f"{unfinished} is being saved, and left alone" in pruned.notes
        assert in_a_fork(repair, tmp_path, timeout_s=60) == []
        assert unfinished.exists()
    assert not unfinished.exists()


def test_a_dry_run_changes_nothing(tmp_path):
    derive_seed(tmp_path)
    before = everything(tmp_path)
    would = prune(tmp_path, keep_last=1, dry_run=True)
    after = everything(tmp_path)
    after.pop(".lock")
    assert after == before
    assert prune(tmp_path, keep_last=1) == would


def test_one_that_had_not_got_its_name_comes_back(tmp_path):
    (path,) = saved(tmp_path, 4)
    os.rename(path, tmp_path / ".saving-1")
    would = prune(tmp_path, keep_last=1, dry_run=True)
    assert (would.renamed, would.removed) == ([path], [])
    assert prune(tmp_path, keep_last=1).renamed == [path]
    assert is_whole(path, 4)


def test_the_newest_valid_one_stays_whatever_is_newer(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        os.truncate(tmp_path / f"step={step}" / "rest.pt", 10)
    pruned = prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [4, 2]
    assert is_whole(str(tmp_path / "step=2"), 2)
    assert [note.split(" has ")[0] for note in pruned.notes] == [
        f"{tmp_path}/step={step} is damaged: rest.pt" for step in (4, 3)
    ]


def test_nothing_is_removed_where_none_is_valid(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(tmp_path / f"step={step}" / "rest.pt", 10)
    assert prune(tmp_path, keep_last=1).removed == []
    assert steps(tmp_path) == [2, 1]


def test_what_the_link_points_at_stays(tmp_path):
    saved(tmp_path, 1, 2, 3)
    update_link(tmp_path / "step=1")  # a run that was started again from an older one
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [3, 1]


def test_urls(tmp_path):
    folder = f"memory://{tmp_path.name}"
    saved(Path(tmp_path), 1, 2, 3)
    fs, root = fsspec.core.url_to_fs(folder)
    fs.put(f"{tmp_path}/", f"{root}/", recursive=True)
    fs.rm_file(f"{root}/step=1/{MANIFEST}")
    assert [entry.kind for entry in list_entries(folder)] == ["checkpoint", "checkpoint", "unfinished"]
    pruned = prune(folder, keep_last=1)
    assert pruned.removed == [f"{folder.replace('//', '///')}/step=2"]
    (note,) = pruned.notes
    assert "step=1 is unfinished: if no run saves there, remove it yourself" in note
    assert [entry.name for entry in list_entries(folder)] == ["step=3", "step=1"]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}], ids=str)
def test_what_makes_no_sense_is_refused(tmp_path, options):
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match=r"--keep-(last|every) must be a whole number of at least 1"):
        prune(tmp_path, **options)
    assert steps(tmp_path) == [1]
