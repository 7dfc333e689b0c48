"""A checkpoint directory is whole or not there, whatever was killed when."""

import json
import math
import os
import zlib
from pathlib import Path

import fsspec
import pytest
import torch

from polyphase.engine.checkpoint import CheckpointError, find, is_checkpoint, lock, read_manifest, repair
from polyphase.engine.checkpoint.checked_io import Files
from polyphase.engine.checkpoint.manifest import MANIFEST, check_may_replace
from polyphase.engine.checkpoint.publish import begin, check_files, discard, publish, remove, update_link, writing_file
from polyphase.engine.checkpoint.retention import list_entries
from polyphase.engine.checkpoint.run_record import replace_file

from ...distributed import in_a_fork
from .sample_checkpoints import manifest, seal


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """An empty folder, on both kinds of filesystems: with renames and links, and without."""
    if request.param == "local":
        yield str(tmp_path)
        return
    url = f"memory://{tmp_path.name}"
    yield url
    fs, root = fsspec.core.url_to_fs(url)
    if fs.exists(root):
        fs.rm(root, recursive=True)


FILE = "rest.pt"


def make(path: str, content: bytes = b"content", **about) -> str:
    """Publishes a checkpoint with one file."""
    publish(staged(path, content, **about), path, manifest(**final(path, content), **about))
    return path


def staged(path: str, content: bytes = b"content", **_) -> str:
    staging = begin(path)
    with Files(staging).writing(FILE) as stream:
        stream.write(content)
    return staging


def final(path: str, content: bytes) -> dict:
    return {"name": os.path.basename(path), "files": {FILE: (len(content), zlib.crc32(content))}}


def names(folder: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(folder)
    return sorted(os.path.basename(entry) for entry in fs.ls(root, detail=False)) if fs.exists(root) else []


def read(path: str) -> bytes:
    assert not check_files(path, read_manifest(path))
    return Files(path).read(FILE)


def test_what_was_published_is_found_with_all_that_the_manifest_says(folder):
    path = make(f"{folder}/x", step=7, layout={"shard": 2})
    said = read_manifest(path)
    assert said == manifest(name="x", step=7, layout={"shard": 2}, files=said.files)
    assert said.num_bytes == 7
    assert read(path) == b"content"
    assert names(folder) == ["x"]


def test_nothing_is_found_before_it_is_published(folder):
    path = f"{folder}/x"
    staging = staged(path)
    assert not is_checkpoint(path)
    assert find(folder) == []
    discard(staging)
    assert names(folder) == []
    discard(staging)  # a second time is no error


def test_the_newest_comes_first(folder):
    for step, time in ((2, 5.0), (10, 1.0), (3, 9.0), (10, 2.0)):
        make(f"{folder}/{step} at {time}", step=step, time=time)
    assert [found.step for _, found in find(folder)] == [10, 10, 3, 2]
    assert [found.time for _, found in find(folder)] == [2.0, 1.0, 9.0, 5.0]
    assert all(read(path) == b"content" for path, _ in find(folder))


def test_a_folder_that_is_not_there_has_no_checkpoints(folder):
    assert find(f"{folder}/absent") == []
    assert repair(f"{folder}/absent") == []


def test_one_of_the_same_name_is_replaced(folder):
    for content in (b"one", b"two"):
        make(f"{folder}/x", content)
    assert read(f"{folder}/x") == b"two"
    assert names(folder) == ["x"]


def test_a_file_of_lightnings_an_empty_folder_and_a_link_that_leads_nowhere_are_replaced(tmp_path):
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "file")  # as each file of Lightning's says
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name in ("file", "folder", "link"):
        assert read(make(f"{tmp_path}/{name}")) == b"content"
    assert names(str(tmp_path)) == ["file", "folder", "link"]


def test_one_that_is_removed_is_gone(folder):
    path = make(f"{folder}/x")
    for _ in range(2):
        remove(path)
        assert names(folder) == []


def test_a_link_or_a_file_can_be_removed_too(tmp_path):
    path = make(f"{tmp_path}/x")
    update_link(path)
    remove(f"{tmp_path}/last")
    assert read(path) == b"content"
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "file.ckpt")
    remove(f"{tmp_path}/file.ckpt")
    assert names(str(tmp_path)) == ["x"]


def test_the_link_points_at_the_last_one_and_is_found_once(tmp_path):
    for name in ("x", "y"):
        make(f"{tmp_path}/{name}")
        update_link(f"{tmp_path}/{name}")
    assert os.readlink(tmp_path / "last") == "y"
    assert read_manifest(tmp_path / "last").name == "y"
    assert len(find(tmp_path)) == 2
    assert names(str(tmp_path)) == ["last", "x", "y"]


# --- what a killed process leaves


def test_a_link_that_had_not_got_its_name_is_removed(tmp_path):
    os.symlink("x", tmp_path / ".link-0123456789ab")
    assert repair(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_one_that_was_published_but_not_renamed_gets_its_name(tmp_path):
    path = make(f"{tmp_path}/x")
    os.rename(path, tmp_path / ".saving-0123")
    assert repair(tmp_path) == [path]
    assert read(path) == b"content"


def test_between_the_two_renames_the_newer_one_gets_the_name(tmp_path):
    path = make(f"{tmp_path}/x", b"old")
    os.rename(path, tmp_path / ".replaced-0123")
    os.rename(make(path, b"new"), tmp_path / ".saving-4567")
    assert repair(tmp_path) == [path]
    assert read(path) == b"new"
    assert names(str(tmp_path)) == ["x"]


def test_half_a_save_costs_nothing_that_was_there(tmp_path):
    path = make(f"{tmp_path}/x", b"old")
    in_a_fork(staged, path, b"half", timeout_s=60)  # a process that ends in the middle
    assert repair(tmp_path) == []
    assert read(path) == b"old"
    assert names(str(tmp_path)) == ["x"]


def test_one_that_was_moved_away_comes_back_if_the_newer_is_damaged(tmp_path):
    path = make(f"{tmp_path}/x", b"old")
    os.rename(path, tmp_path / ".replaced-0123")
    os.rename(make(path, b"new"), tmp_path / ".saving-4567")
    (tmp_path / ".saving-4567" / FILE).write_text("nex")
    assert repair(tmp_path) == [path]
    assert read(path) == b"old"


def test_half_a_removal_is_finished(tmp_path):
    path = make(f"{tmp_path}/x")
    os.remove(f"{path}/{MANIFEST}")
    os.rename(path, tmp_path / ".saving-0123")
    assert repair(tmp_path) == []
    assert names(str(tmp_path)) == []


def test_object_stores_need_no_repair(tmp_path):
    assert repair(f"memory://{tmp_path.name}") == []


# --- what can't be opened


def test_a_missing_path_names_the_one_that_was_probably_meant_and_the_newest(folder):
    for step in (100, 2000):
        make(f"{folder}/step={step}", step=step)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint at .*Did you mean step=100\? The newest one .* step=2000"
    ):
        read_manifest(f"{folder}/step=10")
    with pytest.raises(CheckpointError, match=r"no checkpoint at \S+/best\. The newest one in \S+ is step=2000\.$"):
        read_manifest(f"{folder}/best")


def test_a_missing_path_among_none_says_only_that(folder):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at \S+/x\.$"):
        read_manifest(f"{folder}/x")


def test_a_folder_that_is_none_says_so(folder):
    with fsspec.open(f"{folder}/x/other", "wb", auto_mkdir=True) as stream:
        stream.write(b"something")
    with pytest.raises(CheckpointError, match=f"x is no checkpoint: it has no {MANIFEST}"):
        read_manifest(f"{folder}/x")


def rewrite(path: str, **changes) -> None:
    """A manifest with a right checksum."""
    file = Path(path, MANIFEST)
    content = {**json.loads(file.read_bytes()), **changes}
    del content["crc32"]
    content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps(content))


def test_a_newer_format_says_what_to_install(tmp_path):
    path = make(f"{tmp_path}/x")
    rewrite(path, format=3, versions={"polyphase": "9.8.7"})
    with pytest.raises(CheckpointError, match=r"format 3, .* up to 2: install Polyphase 9\.8\.7 or newer"):
        read_manifest(path)
    assert find(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"crc32": 1}', '{"crc32": 0, "a": "b"}', "\xff"])
def test_a_manifest_of_nonsense_is_damage(tmp_path, content):
    path = make(f"{tmp_path}/x")
    Path(path, MANIFEST).write_bytes(content.encode("latin1"))
    with pytest.raises(CheckpointError, match=rf"x is damaged: {MANIFEST} can't be trusted"):
        read_manifest(path)


def test_a_manifest_with_fields_of_another_format_is_damage(tmp_path):
    path = make(f"{tmp_path}/x")
    rewrite(path, surprise=1)
    with pytest.raises(CheckpointError, match=r"can't be trusted .*surprise"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": 1 << 62}, "it.step is a value of type int"),
        ({"sequence": 1 << 62}, "it.sequence is a value of type int"),
        ({"time": 1e300}, r"it.time is 1e\+300"),
        ({"name": "a\\b"}, "which is no name within a folder"),
        ({"name": ".lock"}, "a name that checkpoints don't have"),
        ({"loggers": ({"place": math.nan},)}, "NaN is no number"),
        ({"run": "x" * (1 << 26)}, "bytes, more than"),
    ],
    ids=lambda value: f"{value}"[:30],
)
def test_what_could_not_be_opened_again_is_not_published(tmp_path, changes, why):
    old = make(f"{tmp_path}/x")
    staging = begin(f"{tmp_path}/x")
    with pytest.raises(CheckpointError, match=rf"is not saved, since it could not be opened again: .*{why}"):
        publish(staging, f"{tmp_path}/x", manifest(**changes))
    assert read_manifest(old).step == 1


# --- checks and locks


def test_ranks_share_the_work_of_checking(tmp_path):
    staging = begin(f"{tmp_path}/x")
    files = Files(staging)
    for name in "abcdefg":
        with files.writing(name) as stream:
            stream.write(name.encode())
    publish(staging, f"{tmp_path}/x", manifest(files=files.written))
    (tmp_path / "x" / "c").write_text("x")
    (tmp_path / "x" / "f").unlink()
    found = [check_files(f"{tmp_path}/x", read_manifest(f"{tmp_path}/x"), (rank, 3)) for rank in range(3)]
    assert found == [[], [], ["the content of c was changed (its checksum differs)", "f is missing"]]


def test_a_file_that_has_checksums_of_its_own_is_given_no_other(tmp_path):
    with writing_file(tmp_path / "x.ckpt") as (stream, _):
        torch.save({"weight": torch.ones(1000)}, stream)
        assert stream.num_bytes > 4000
        assert stream.crc == 0
    assert torch.load(tmp_path / "x.ckpt")["weight"].sum() == 1000


def test_a_lock_is_free_once_released(tmp_path):
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        release = lock(folder)
        assert f"process {os.getpid()} on " in (folder / ".lock").read_text()
        release()


def test_object_stores_have_no_locks(tmp_path):
    url = f"memory://{tmp_path.name}"
    lock(url)()
    assert names(url) == []


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "rest.pt").symlink_to("mine")
    with pytest.raises(FileExistsError), Files(tmp_path).writing("rest.pt") as stream:
        stream.write(b"ours")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_file_of_bytes_is_named_and_not_changed(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="not a lock file of Polyphase"):
        lock(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == b"\xff\xfe\x00"


@pytest.mark.parametrize("name", ["é" * 200, "two\nlines"], ids=["of too many bytes", "of two lines"])
def test_a_leftover_of_a_name_that_no_file_can_have_stops_no_run(tmp_path, name):
    path = make(f"{tmp_path}/x")
    os.rename(path, tmp_path / ".saving-0123")
    said = json.loads((tmp_path / ".saving-0123" / MANIFEST).read_text())
    seal(tmp_path / ".saving-0123", {**said, "name": name})
    assert repair(tmp_path) == []
    assert names(tmp_path) == []


def test_a_small_file_that_could_not_be_written_leaves_nothing(tmp_path):
    (tmp_path / ".run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(f"{tmp_path}/.run.json", b"content")
    assert names(tmp_path) == [".run.json"]


def test_entries_of_another_user_stop_no_save(tmp_path):
    """Root may read all, so a process of its own gives up that right."""

    def look() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        assert repair(tmp_path) == []
        assert find(tmp_path) == []
        assert [entry.name for entry in list_entries(tmp_path)] == [".saving-0123", "step=1"]
        for name in ("step=1", "x.ckpt"):
            with pytest.raises(CheckpointError, match="not readable"):
                check_may_replace(tmp_path / name)

    for name in ("step=1", ".saving-0123"):
        (tmp_path / name).mkdir(mode=0)
    for name in ("x.ckpt", ".saving-4567"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
        (tmp_path / name).chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    in_a_fork(look, timeout_s=60.0)
