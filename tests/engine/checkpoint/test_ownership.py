"""Nothing of the user's is replaced or removed: neither folders nor files, nor what lies within a checkpoint."""

import json
import os
from pathlib import Path

import pytest
import torch

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, lock, repair
from polyphase.engine.checkpoint import publish as stores
from polyphase.engine.checkpoint.engine_io import EngineIO
from polyphase.engine.checkpoint.manifest import MANIFEST, is_torch_file, path_status, read_manifest
from polyphase.engine.checkpoint.publish import begin, publish, remove

from .sample_checkpoints import about, content, is_whole, manifest, rank_state, save, seal


def thesis(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("three years")
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_folder(path: Path) -> None:
    thesis(path)


def a_file(path: Path) -> None:
    path.write_text("three years")


def a_link(path: Path) -> None:
    path.symlink_to(thesis(path.parent / "elsewhere"))


def a_checkpoint_with_notes(path: Path) -> None:
    save(path)
    (path / "notes.txt").write_text("what I saw")


def a_manifest_of_something_else(path: Path) -> None:
    thesis(path)
    (path / MANIFEST).write_text('{"name": "a browser extension"}')


def a_manifest_that_lists_what_is_not_ours(path: Path) -> None:
    save(path)
    (path / "thesis.tex").write_text("three years")
    seal(path)


def torch_weights_of_another_tool(path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, path)


FOREIGN = [
    *(a_folder, a_file, a_link, a_checkpoint_with_notes, a_manifest_of_something_else),
    *(a_manifest_that_lists_what_is_not_ours, torch_weights_of_another_tool),
]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_what_is_not_ours_is_neither_replaced_nor_removed(tmp_path, make):
    path = tmp_path / "x"
    make(path)
    before = everything(tmp_path)
    says = f"{path} is .*: nothing is saved there, because that would delete it"
    with pytest.raises(CheckpointError, match=says):
        begin(path)
    with pytest.raises(CheckpointError, match=says):
        save(path, 2)
    (tmp_path / "staging").mkdir()  # by whoever was faster than the first look
    with pytest.raises(CheckpointError, match=says):
        publish(str(tmp_path / "staging"), path, manifest())
    after = everything(tmp_path)
    del after[f"staging/{MANIFEST}"]
    assert after == before


@pytest.mark.parametrize("make", [a_folder, a_file, a_manifest_of_something_else], ids=lambda make: make.__name__)
def test_what_is_not_ours_is_not_removed(tmp_path, make):
    make(tmp_path / "x")
    before = everything(tmp_path)
    with pytest.warns(UserWarning, match="it is not removed"):
        remove(tmp_path / "x")
    assert everything(tmp_path) == before


def test_of_a_checkpoint_with_notes_only_the_checkpoint_is_removed(tmp_path):
    a_checkpoint_with_notes(tmp_path / "x")
    with pytest.warns(UserWarning, match=r"x is a checkpoint that holds notes\.txt, .* it is not removed"):
        remove(tmp_path / "x")
    assert everything(tmp_path) == {"x/notes.txt": b"what I saw"}


def test_a_checkpoint_of_ours_is_replaced_and_removed(tmp_path):
    save(tmp_path / "x", 1)
    assert is_whole(save(tmp_path / "x", 2), 2)
    remove(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint_is_moved_aside(tmp_path):
    save(tmp_path / "x", 1)
    (tmp_path / "x" / MANIFEST).write_text("{}")
    assert path_status(tmp_path / "x").kind == "damaged"
    with pytest.warns(UserWarning, match=r"x was damaged: it was renamed to \S+/x\.damaged-\w+,"):
        assert is_whole(save(tmp_path / "x", 2), 2)
    (aside,) = tmp_path.glob("x.damaged-*")
    assert (aside / "rest.pt").exists()


def test_a_manifest_of_a_format_before_the_first_release_is_refused(tmp_path):
    save(tmp_path / "x", 1)
    seal(tmp_path / "x", {**json.loads((tmp_path / "x" / MANIFEST).read_bytes()), "format": 1})
    with pytest.raises(CheckpointError, match="its format is 1, which no release has written"):
        read_manifest(tmp_path / "x")


def test_a_manifest_of_a_newer_version_is_moved_aside_too(tmp_path):
    save(tmp_path / "x", 1)
    seal(tmp_path / "x", {"format": 99, "versions": {}})
    with pytest.warns(UserWarning, match="it was renamed to"):
        save(tmp_path / "x", 2)
    assert len([*tmp_path.glob("x.damaged-*")]) == 1


def test_urls(tmp_path):
    url = f"memory://{tmp_path.name}"
    fs = stores.resolve(url)[0]
    fs.pipe_file(f"{url}/x/thesis.tex", b"three years")
    with pytest.raises(CheckpointError, match=r"x is a folder that holds thesis\.tex, which no checkpoint has"):
        save(f"{url}/x")
    assert fs.cat_file(f"{url}/x/thesis.tex") == b"three years"
    fs.rm(url, recursive=True)


def test_a_damaged_checkpoint_at_a_url_is_moved_aside_and_an_unfinished_one_removed(tmp_path):
    url = f"memory://{tmp_path.name}"
    fs = stores.resolve(url)[0]
    save(f"{url}/x", 1)
    fs.pipe_file(f"{url}/x/{MANIFEST}", b"{}")
    with pytest.warns(UserWarning, match=r"x was damaged: it was renamed to memory:\S+/x\.damaged-\w+,"):
        save(f"{url}/x", 2)
    (aside,) = fs.glob(f"{url}/x.damaged-*")
    assert fs.exists(f"{aside}/rest.pt")
    fs.rm_file(f"{url}/x/{MANIFEST}")
    assert is_whole(save(f"{url}/x", 3), 3)
    assert len(fs.ls(url)) == 2
    fs.rm(url, recursive=True)


def test_in_the_background_it_is_said_too(tmp_path):
    saver = AsyncCheckpointer()
    thesis(tmp_path / "x")
    saver.save(content(1), str(tmp_path / "x"), about=about(1), of_rank=rank_state(1))
    with pytest.warns(RuntimeWarning, match=r"could not be saved: \S+/x is a folder that holds thesis\.tex"):
        saver.finish()
    assert os.listdir(tmp_path) == ["x"]


# --- what a killed process has left, and what only looks like it


def test_a_folder_of_the_users_with_a_hidden_name_stays(tmp_path):
    thesis(tmp_path / ".saving-0123456789ab")
    thesis(tmp_path / ".saving-money")
    (tmp_path / ".link-0123456789ab").write_text("a file")
    before = everything(tmp_path)
    assert repair(tmp_path) == []
    assert everything(tmp_path) == before


def test_what_a_newer_version_has_left_stays(tmp_path):
    save(tmp_path / "x", 1)
    seal(tmp_path / "x", {"format": 99, "versions": {}})
    os.rename(tmp_path / "x", tmp_path / ".saving-0123456789ab")
    assert repair(tmp_path) == []
    assert (tmp_path / ".saving-0123456789ab" / MANIFEST).exists()


def test_last_that_is_a_folder_stays_and_the_save_succeeds(tmp_path):
    thesis(tmp_path / "last")
    saver = AsyncCheckpointer()
    saver.save(content(1), str(tmp_path / "x"), about=about(1), of_rank=rank_state(1), link="last")
    with pytest.warns(UserWarning, match="last is no link, so it is left unchanged"):
        saver.finish()
    assert saver.newest == str(tmp_path / "x")
    assert is_whole(str(tmp_path / "x"), 1)
    assert sorted(os.listdir(tmp_path)) == ["last", "x"]
    assert (tmp_path / "last" / "thesis.tex").exists()


# --- names of folders


def test_a_folder_with_two_colons_in_its_name_is_that_folder(tmp_path):
    for step in (1, 2):
        assert is_whole(save(tmp_path / "a::b" / "x", step), step)
    assert os.listdir(tmp_path) == ["a::b"]
    release = lock(tmp_path / "c::d")
    release()
    assert sorted(os.listdir(tmp_path)) == ["a::b", "c::d"]


# --- locks


@pytest.mark.parametrize("content", ["three years", ""])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path, content):
    (tmp_path / "thesis.tex").write_text(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".lock").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(CheckpointError, match=r"\.lock is not a lock file of Polyphase"):
        lock(tmp_path / "folder")
    assert (tmp_path / "thesis.tex").read_text() == content


@pytest.mark.parametrize("make", [a_file, Path.mkdir, os.mkfifo], ids=["a file", "a folder", "a pipe"])
def test_a_lock_that_is_something_else_is_left_alone(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock is not a lock file of Polyphase"):
        lock(tmp_path)


def test_one_process_takes_a_folder_once(tmp_path):
    release = lock(tmp_path)
    with pytest.raises(CheckpointError, match="another engine of this process writes its checkpoints there"):
        lock(tmp_path / "." / "")
    assert not child_can_lock(tmp_path)  # the refusal has not let the first one's go
    release()
    assert child_can_lock(tmp_path)
    lock(tmp_path)()


def child_can_lock(folder: Path) -> bool:
    child = os.fork()
    if child == 0:
        try:
            lock(folder)
        except CheckpointError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_folder_that_was_removed_comes_back_with_its_lock(tmp_path):
    folder = tmp_path / "folder"
    release = lock(folder)
    (folder / ".lock").unlink()
    folder.rmdir()
    save(folder / "x")
    assert not child_can_lock(folder)
    release()
    assert child_can_lock(folder)


def test_a_file_that_lightnings_launchers_pass_weights_in_is_removed(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / ".temp.ckpt")
    (tmp_path / "thesis.tex").write_text("three years")
    (tmp_path / "link").symlink_to(tmp_path / "thesis.tex")
    assert is_torch_file(tmp_path / ".temp.ckpt")
    assert not is_torch_file(tmp_path / "thesis.tex")
    assert not is_torch_file(tmp_path / "link")
    EngineIO(AsyncCheckpointer()).remove_checkpoint(str(tmp_path / ".temp.ckpt"))
    with pytest.warns(UserWarning, match="it is not removed"):
        EngineIO(AsyncCheckpointer()).remove_checkpoint(str(tmp_path / "thesis.tex"))
    assert sorted(os.listdir(tmp_path)) == ["link", "thesis.tex"]
